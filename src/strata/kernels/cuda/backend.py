"""An NVIDIA card as the ``Backend`` of kernels/backend.py: memory under a cap, page-locking, streams and copies.

Lives in ``kernels/cuda`` because only this room knows the driver. The cap holds for this backend's allocations and
what is charged for torch together, so a large card behaves as a small one. It must not know what an expert is.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from strata.errors import MemoryPlanError
from strata.kernels.backend import DeviceInfo, DeviceMemoryFull, PinRefused
from strata.kernels.cuda.driver import CudaContext, CudaError, ask
from strata.kernels.cuda.handles import Charge, CudaBuffer, CudaEvent, CudaLendable, CudaRegistration, CudaStream
from strata.kernels.cuda.lendable import MappedRange

__all__ = ["CudaBackend", "CudaStatistics"]

ALIGNMENT = 4096  # of a Buffer; the driver itself aligns small allocations to 512 only
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
# After one of these the context answers nothing any more: never the answer to a registration, always the device's end.
BROKEN = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT DEINITIALIZED CONTEXT_IS_DESTROYED DEVICE_UNAVAILABLE ECC_UNCORRECTABLE HARDWARE_STACK_ERROR "
        "ILLEGAL_ADDRESS ILLEGAL_INSTRUCTION INVALID_ADDRESS_SPACE INVALID_CONTEXT INVALID_PC LAUNCH_FAILED "
        "LAUNCH_TIMEOUT MISALIGNED_ADDRESS NOT_INITIALIZED NVLINK_UNCORRECTABLE"
    ).split()
)


@dataclass(frozen=True)
class CudaStatistics:
    """Counters of a ``CudaBackend``; bytes unless named otherwise. ``cap_bytes`` None: all that the card has.

    ``peak_bytes``: the most that was allocated here and charged for torch at once; ``torch_peak_bytes``: what torch
    really took of it at most, 0 while it has no share. ``card_bytes``: what the card has less free than at the opening,
    what the driver takes for kernels and graphs and what other programs took meanwhile included.
    """

    cap_bytes: int | None
    device_bytes: int
    charged_bytes: int
    peak_bytes: int
    torch_peak_bytes: int
    card_bytes: int
    pinned_bytes: int
    num_registrations: int
    num_refusals: int
    num_copies: int
    copied_bytes: int


def give_back_workspaces() -> None:
    """Of the library's products, 32 MiB for each thread that had one: torch keeps them when the thread ends."""
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # not in a build without CUDA
    if clear is not None:
        clear()


class CudaBackend:
    """``Backend`` over one card's context, which it borrows. Any thread may call it.

    ``cap_bytes`` is what may be taken in all (``--vram-gib``); None: what the card has free.
    """

    def __init__(self, context: CudaContext, cap_bytes: int | None = None) -> None:
        self.context = context
        self.cap_bytes = cap_bytes
        self._lock = threading.RLock()  # a collected buffer may give back while its own thread holds it
        self._device_bytes = self._charged_bytes = self._peak_bytes = self._pinned_bytes = 0
        self._num_registrations = self._num_refusals = self._num_copies = self._copied_bytes = 0
        self._torch_bytes: Callable[[], tuple[int, int]] | None = None  # (now, at most) while torch has a share
        self._torch_most = 0
        self._borders: list[int] = []  # of registered ranges, sorted; a border of two neighbours is there twice
        self._streams: list[CudaStream] = []
        self._events: list[Any] = []
        self._is_open = True
        self._free_at_first = context.memory()[0]

    def info(self) -> DeviceInfo:
        card = self.context.card
        free, total = self.context.memory()
        if self.cap_bytes is not None:
            total, free = min(total, self.cap_bytes), min(free, self._room())
        return DeviceInfo(card.name, "cuda", total, free, pins_charge_device=card.integrated)

    def allocate(self, nbytes: int) -> CudaBuffer:
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes <= 0 or not self._take(rounded):
            raise DeviceMemoryFull(nbytes, self._free_bytes())
        try:
            base, address = self._allocate_aligned(rounded)
        except CudaError as error:
            self._give_back(rounded)
            if error.name == OUT_OF_MEMORY:
                raise DeviceMemoryFull(nbytes, self._free_bytes()) from None
            raise
        except BaseException:
            self._give_back(rounded)
            raise

        def release() -> None:
            self.context.use()
            ask(self.context.driver.cuMemFree(base), f"freeing {nbytes} bytes of VRAM")
            self._give_back(rounded)

        return CudaBuffer(address, nbytes, release)

    def allocate_lendable(self, nbytes: int, piece_bytes: int) -> CudaLendable:
        """As ``allocate``. What is lent goes to torch's share, and is charged as that."""
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes <= 0 or not self._take(rounded):
            raise DeviceMemoryFull(nbytes, self._free_bytes())
        try:
            mapped = MappedRange(self.context, nbytes, piece_bytes)
        except CudaError as error:
            self._give_back(rounded)
            if error.name == OUT_OF_MEMORY:
                raise DeviceMemoryFull(nbytes, self._free_bytes()) from None
            if error.name == "CUDA_ERROR_NOT_SUPPORTED":
                raise MemoryPlanError(
                    "this driver maps no VRAM anew, so prompts cannot borrow their buffers", "use --no-prefill-borrow"
                ) from None
            raise
        except BaseException:
            self._give_back(rounded)
            raise

        def release() -> None:
            mapped.free()
            self._give_back(rounded)

        return CudaLendable(mapped, nbytes, release, self)

    def lend_to_torch(self, nbytes: int) -> None:
        """Torch's tensors may take ``nbytes`` more, of memory that was given back to the driver."""
        with self._lock:
            self._device_bytes -= nbytes
            self._charged_bytes += nbytes
        self._most_of_torch(nbytes)

    def take_from_torch(self, nbytes: int) -> None:
        """Ends ``lend_to_torch``: what torch keeps without a tensor in it goes back to the driver."""
        import torch

        if self._torch_bytes is not None:
            give_back_workspaces()
            torch.cuda.empty_cache()
        with self._lock:
            self._device_bytes += nbytes
            self._charged_bytes -= nbytes
        self._most_of_torch(-nbytes)

    def _most_of_torch(self, more: int) -> None:
        import torch

        if self._torch_bytes is not None:
            card = self.context.card
            self._torch_most += more
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._torch_most / card.memory_total), card.index)

    def charge(self, nbytes: int) -> Charge:
        """Takes ``nbytes`` of the cap for what another allocates. Raises ``DeviceMemoryFull``."""
        if not self._take(nbytes, charged=True):
            raise DeviceMemoryFull(nbytes, self._free_bytes())
        return Charge(nbytes, lambda: self._give_back(nbytes, charged=True))

    def share_with_torch(self, planned: int, most: int) -> Charge:
        """Charges ``planned`` bytes for torch's tensors; torch is refused more than ``most`` until the charge is
        released. The difference is for what its allocator rounds up.

        Raises ``MemoryPlanError`` where live tensors hold more already, ``DeviceMemoryFull`` where the cap has no room.
        """
        import torch

        card = self.context.card
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(card.index)
        if held > most:
            raise MemoryPlanError(
                f"torch holds {held >> 20} MiB of VRAM, the plan gives it {most >> 20} MiB",
                "free its tensors before the model is loaded",
                short_bytes=held - most,
            )
        charge = self.charge(planned)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / card.memory_total), card.index)
        torch.cuda.reset_peak_memory_stats(card.index)
        self._torch_most = most
        self._torch_bytes = lambda: (
            int(torch.cuda.memory_reserved(card.index)),
            int(torch.cuda.max_memory_reserved(card.index)),
        )

        def release() -> None:
            self._torch_bytes = None
            torch.cuda.set_per_process_memory_fraction(1.0, card.index)
            charge.release()

        return Charge(planned, release)

    def allocate_pinned(self, nbytes: int, *, mapped: bool = True) -> tuple[CudaBuffer, CudaRegistration]:
        driver = self.context.driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | (driver.CU_MEMHOSTALLOC_DEVICEMAP if mapped else 0)
        self.context.use()
        address = int(self._ask_pinned(driver.cuMemHostAlloc(nbytes, flags), nbytes))
        try:
            alias = self._alias(address, nbytes) if mapped else None
        except BaseException:
            driver.cuMemFreeHost(address)
            raise
        self._count_pinned(nbytes)

        def release() -> None:
            self.context.use()
            ask(driver.cuMemFreeHost(address), f"freeing {nbytes} page-locked bytes")
            self._count_pinned(-nbytes)

        return CudaBuffer(address, nbytes, release), CudaRegistration(address, nbytes, alias, lambda: None)

    def pieces(self, destination: int, source: int, nbytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the parts of a copy: the driver refuses one that goes over the border of two registered
        ranges, though they are neighbours."""
        cuts = {0, nbytes}
        for address in (destination, source):
            for border in self._borders[bisect_right(self._borders, address) :]:
                if border >= address + nbytes:
                    break
                cuts.add(border - address)
        ordered = sorted(cuts)
        return [(first, last - first) for first, last in pairwise(ordered)]

    def register(self, address: int, nbytes: int) -> CudaRegistration:
        assert nbytes > 0, "a registration of zero bytes"
        assert address % ALIGNMENT == 0, "registration works on whole pages"
        assert nbytes % ALIGNMENT == 0, "registration works on whole pages"
        driver = self.context.driver
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self.context.use()
        with self._lock:
            self._num_registrations += 1
        self._ask_pinned(driver.cuMemHostRegister(address, nbytes, flags), nbytes)
        try:
            alias = self._alias(address, nbytes)
        except BaseException:
            driver.cuMemHostUnregister(address)
            raise
        self._count_pinned(nbytes)
        borders = (address, address + nbytes)
        with self._lock:
            for border in borders:
                insort(self._borders, border)

        def release() -> None:
            with self._lock:
                for border in borders:
                    self._borders.remove(border)
            self.context.use()
            ask(driver.cuMemHostUnregister(address), f"unlocking {nbytes} bytes")
            self._count_pinned(-nbytes)

        return CudaRegistration(address, nbytes, alias, release)

    def stream(self) -> CudaStream:
        stream = CudaStream(self)
        with self._lock:
            self._streams.append(stream)
        return stream

    def event(self) -> CudaEvent:
        """An event that nothing was recorded in; from those that were collected where there is one."""
        self.context.use()
        with self._lock:
            handle = self._events.pop() if self._events else None
        if handle is None:
            driver = self.context.driver
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            handle = ask(driver.cuEventCreate(int(flags)), "making an event")
        return CudaEvent(self, handle)

    def recycle(self, handle: Any) -> None:
        """What a collected event does with its handle."""
        with self._lock:
            if self._is_open:
                self._events.append(handle)
                return
        self.context.driver.cuEventDestroy(handle)

    def close(self) -> None:
        """Ends the streams and events; buffers and registrations are their owners' to free. May be called twice."""
        with self._lock:
            self._is_open = False
            streams, self._streams = self._streams, []
            events, self._events = self._events, []
        for stream in streams:
            stream.close()
        for handle in events:
            self.context.driver.cuEventDestroy(handle)

    def count_copies(self, count: int, nbytes: int) -> None:
        with self._lock:
            self._num_copies += count
            self._copied_bytes += nbytes

    def statistics(self) -> CudaStatistics:
        torch_peak = 0 if self._torch_bytes is None else self._torch_bytes()[1]
        free, _ = self.context.memory()
        with self._lock:
            return CudaStatistics(
                cap_bytes=self.cap_bytes,
                device_bytes=self._device_bytes,
                charged_bytes=self._charged_bytes,
                peak_bytes=self._peak_bytes,
                torch_peak_bytes=torch_peak,
                card_bytes=self._free_at_first - free,
                pinned_bytes=self._pinned_bytes,
                num_registrations=self._num_registrations,
                num_refusals=self._num_refusals,
                num_copies=self._num_copies,
                copied_bytes=self._copied_bytes,
            )

    def _allocate_aligned(self, nbytes: int) -> tuple[Any, int]:
        """(what to free, the aligned address). The driver aligns large allocations far better than asked here."""
        driver = self.context.driver
        self.context.use()
        base = ask(driver.cuMemAlloc(nbytes), f"taking {nbytes} bytes of VRAM")
        if int(base) % ALIGNMENT == 0:
            return base, int(base)
        driver.cuMemFree(base)
        base = ask(driver.cuMemAlloc(nbytes + ALIGNMENT), f"taking {nbytes} bytes of VRAM")
        return base, -(-int(base) // ALIGNMENT) * ALIGNMENT

    def _alias(self, address: int, nbytes: int) -> int:
        driver = self.context.driver
        return int(self._ask_pinned(driver.cuMemHostGetDevicePointer(address, 0), nbytes))

    def _ask_pinned(self, answer: tuple[Any, ...], nbytes: int) -> Any:
        """The result, or ``PinRefused`` in CUDA's words; an error of a broken device stays one."""
        try:
            return ask(answer, f"page-locking {nbytes} bytes")
        except CudaError as error:
            if error.name in BROKEN:
                raise
            with self._lock:
                self._num_refusals += 1
            raise PinRefused(nbytes, f"{error.name}: {error.words}") from None

    def _take(self, nbytes: int, *, charged: bool = False) -> bool:
        with self._lock:
            total = self._device_bytes + self._charged_bytes + nbytes
            if self.cap_bytes is not None and total > self.cap_bytes:
                return False
            if charged:
                self._charged_bytes += nbytes
            else:
                self._device_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, total)
            return True

    def _give_back(self, nbytes: int, *, charged: bool = False) -> None:
        with self._lock:
            if charged:
                self._charged_bytes -= nbytes
            else:
                self._device_bytes -= nbytes

    def _count_pinned(self, nbytes: int) -> None:
        with self._lock:
            self._pinned_bytes += nbytes

    def _room(self) -> int:
        """Bytes left under the cap; what torch took beyond its charge is off it."""
        assert self.cap_bytes is not None, "asked only with a cap"
        by_torch = 0 if self._torch_bytes is None else self._torch_bytes()[0]
        with self._lock:
            return max(0, self.cap_bytes - self._device_bytes - max(self._charged_bytes, by_torch))

    def _free_bytes(self) -> int:
        free, _ = self.context.memory()
        return free if self.cap_bytes is None else min(free, self._room())
