"""CUDA's driver API through NVIDIA's Python packages: found, checked, asked, and its errors in its own words.

Lives in ``kernels/cuda`` as the one place that imports ``cuda.bindings``; everything is loaded on first use, because a
PC without a card never needs it. A ``CudaContext`` is the card's primary context, the one that torch uses too, so
memory of both is addressed by both. It must not know kernels, memory rules or what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from strata import interrupts
from strata.errors import ConfigError, EngineError

__all__ = ["Card", "CudaContext", "CudaError", "ask", "find_card", "load_nvrtc", "open_context", "read_cards", "start"]

LEAST_CUDA = 13000  # as cuDriverGetVersion counts: the bindings and the machine code are of this version
LEAST_DRIVER = "580"  # the first driver that serves it
USE_CPU = "use --device cpu"
INSTALL = "pip install 'strata-moe[cuda]'"


class CudaError(EngineError):
    """A CUDA call that failed. ``name`` is CUDA's constant (CUDA_ERROR_OUT_OF_MEMORY), ``words`` its sentence."""

    def __init__(self, doing: str, name: str, words: str) -> None:
        super().__init__(f"{doing} failed: {name}: {words}")
        self.name = name
        self.words = words


@dataclass(frozen=True)
class Card:
    """What CUDA says of one card; bytes. ``architecture`` is 90 for sm_90. ``max_shared``: of one block, asked for.

    ``display``: the system stops a kernel that runs too long (about 2 s). ``integrated``: its memory is the RAM.
    """

    index: int
    name: str
    pci: str
    architecture: int
    multiprocessors: int
    memory_total: int
    max_shared: int
    cache_bytes: int
    display: bool
    integrated: bool
    cuda: tuple[int, int]  # what the driver serves


def ask(answer: tuple[Any, ...], doing: str) -> Any:
    """The result of a driver call, None or a list where it has not exactly one. Raises ``CudaError``."""
    status, *results = answer
    if int(status) != 0:
        raise CudaError(doing, status.name, _words(status))
    if not results:
        return None
    return results[0] if len(results) == 1 else results


def start() -> tuple[Any, tuple[int, int]]:
    """The driver's bindings, initialised, and the CUDA version that the driver serves.

    Raises ``ConfigError``: no package, no driver, a driver that is too old, or CUDA's own reason to serve nothing.
    """
    driver = bindings("driver")
    try:
        number = ask(driver.cuDriverGetVersion(), "asking the driver's version")
    except RuntimeError as error:  # the bindings' own, where the driver's library cannot be loaded
        raise ConfigError(
            f"no NVIDIA driver is installed: {error}", f"install driver {LEAST_DRIVER} or newer, or {USE_CPU}"
        ) from None
    version = (number // 1000, number % 1000 // 10)
    if number < LEAST_CUDA:
        raise ConfigError(
            f"the NVIDIA driver serves CUDA {version[0]}.{version[1]}, Strata needs CUDA {LEAST_CUDA // 1000}."
            f"{LEAST_CUDA % 1000 // 10}",
            f"install driver {LEAST_DRIVER} or newer, or {USE_CPU}",
        )
    try:
        ask(driver.cuInit(0), "starting CUDA")
    except CudaError as error:
        raise ConfigError(error.message, USE_CPU) from None
    return driver, version


def load_nvrtc() -> Any:
    """The bindings of the run-time compiler, whose library is there. Raises ``ConfigError``."""
    nvrtc = bindings("nvrtc")
    try:
        status = nvrtc.nvrtcVersion()[0]
    except RuntimeError as error:
        missing = " ".join(str(error).split()).partition(":")[2].partition(",")[0].strip() or str(error)
        raise ConfigError(f"the CUDA run-time compiler is missing: {missing}", INSTALL) from None
    if int(status) != 0:
        raise ConfigError(f"the CUDA run-time compiler does not start: {status.name}", INSTALL)
    return nvrtc


def read_cards() -> list[Card]:
    """All cards that CUDA shows this process, in its order. Raises as ``start``."""
    driver, version = start()
    count = ask(driver.cuDeviceGetCount(), "counting the cards")
    return [_read_card(driver, index, version) for index in range(count)]


def find_card(index: int) -> Card:
    """Card ``index``. Raises ``ConfigError`` that says how many there are, or as ``start``."""
    cards = read_cards()
    if index >= len(cards):
        found = ", ".join(f"cuda:{card.index} = {card.name}" for card in cards) or "none"
        raise ConfigError(
            f"--device cuda:{index}: {len(cards)} CUDA device{'' if len(cards) == 1 else 's'} here ({found})",
            f"use --device cuda:{len(cards) - 1}" if cards else USE_CPU,
        )
    return cards[index]


class CudaContext:
    """The primary context of a card, shared with torch. Close once, after everything that was made in it."""

    def __init__(self, driver: Any, card: Card) -> None:
        self.driver = driver
        self.card = card
        self._device = ask(driver.cuDeviceGet(card.index), f"opening {card.name}")
        self._handle = ask(driver.cuDevicePrimaryCtxRetain(self._device), f"opening a context on {card.name}")
        self._is_open = True
        self.use()

    def use(self) -> None:
        """Makes the context the calling thread's; every thread that asks CUDA for something does this first."""
        ask(self.driver.cuCtxSetCurrent(self._handle), "choosing the card's context")

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the card, other programs' memory counted as taken."""
        self.use()
        free, total = ask(self.driver.cuMemGetInfo(), "asking for free VRAM")
        return int(free), int(total)

    def synchronize(self) -> None:
        """Waits for everything on the card. Raises ``CudaError`` of whatever failed."""
        self.use()
        ask(self.driver.cuCtxSynchronize(), "waiting for the card")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.driver.cuDevicePrimaryCtxRelease(self._device)


def open_context(index: int) -> CudaContext:
    """Raises ``ConfigError`` as ``find_card``, ``CudaError`` where the card refuses, such as for lack of memory."""
    card = find_card(index)
    driver, _ = start()
    return CudaContext(driver, card)


def bindings(name: str) -> Any:
    try:
        with interrupts.at_once():
            return import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise ConfigError(f"a CUDA device needs the package cuda-python: {error}", INSTALL) from None


def _words(status: Any) -> str:
    failed, text = bindings("driver").cuGetErrorString(status)
    return "no description" if int(failed) != 0 or not text else text.decode("utf-8", "replace")


def _read_card(driver: Any, index: int, version: tuple[int, int]) -> Card:
    device = ask(driver.cuDeviceGet(index), f"opening card {index}")
    kinds = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(ask(driver.cuDeviceGetAttribute(kind, device), f"reading {name} of card {index}"))

    def text(answer: tuple[Any, ...]) -> str:
        raw: bytes = ask(answer, f"naming card {index}")
        return raw.split(b"\0")[0].decode("utf-8", "replace")

    return Card(
        index=index,
        name=text(driver.cuDeviceGetName(256, device)),
        pci=text(driver.cuDeviceGetPCIBusId(32, device)),
        architecture=attribute("COMPUTE_CAPABILITY_MAJOR") * 10 + attribute("COMPUTE_CAPABILITY_MINOR"),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory_total=int(ask(driver.cuDeviceTotalMem(device), f"reading the memory of card {index}")),
        max_shared=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        cache_bytes=attribute("L2_CACHE_SIZE"),
        display=bool(attribute("KERNEL_EXEC_TIMEOUT")),
        integrated=bool(attribute("INTEGRATED")),
        cuda=version,
    )
