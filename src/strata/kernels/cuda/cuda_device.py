"""An opened card: its context, what runs launches on it and what gives its memory, made and closed together.

Lives in ``kernels/cuda`` on top of driver.py, device.py and backend.py. Whether a card can be used at all is answered
here as well. It must not know models or plans.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from strata.errors import ConfigError
from strata.kernels.cuda.backend import CudaBackend
from strata.kernels.cuda.device import CudaMachine
from strata.kernels.cuda.driver import Card, CudaContext, find_card, load_nvrtc, start
from strata.kernels.cuda.handles import CudaBuffer
from strata.paths import Home

__all__ = ["CudaDevice", "check_card", "open_device"]

LEAST_ARCHITECTURE = 75  # the oldest that the compiler of CUDA 13 makes machine code for
USE_CPU = "use --device cpu"


class CudaDevice:
    """A card in use. Owns context, machine and backend; memory taken from the backend is freed before ``close``."""

    def __init__(self, context: CudaContext, machine: CudaMachine, backend: CudaBackend) -> None:
        self.context = context
        self.machine = machine
        self.backend = backend

    @property
    def card(self) -> Card:
        return self.context.card

    def describe(self) -> str:
        """One line for the log."""
        card = self.card
        return (
            f"{card.name} (cuda:{card.index}, sm_{card.architecture}, {card.multiprocessors} multiprocessors), "
            f"driver for CUDA {card.cuda[0]}.{card.cuda[1]}"
        )

    def tensor(self, buffer: CudaBuffer) -> torch.Tensor:
        """The bytes of a buffer as a uint8 tensor on the card, without a copy; it keeps the buffer alive."""
        return torch.as_tensor(_Bytes(buffer), device=self.machine.device)

    def trim(self) -> None:
        """Gives back what torch keeps of freed tensors, so that free memory is what it seems."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """In the reverse order of opening. May be called twice."""
        self.machine.close()
        self.backend.close()
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_card(index: int) -> Card:
    """Card ``index``, if everything that using it takes is there. Opens nothing.

    Raises ``ConfigError`` that names what is missing: packages, driver, the card, its age, or a torch that knows CUDA.
    """
    card = find_card(index)
    if card.architecture < LEAST_ARCHITECTURE:
        raise ConfigError(
            f"{card.name} is of architecture sm_{card.architecture}, Strata needs sm_{LEAST_ARCHITECTURE} or newer",
            USE_CPU,
        )
    load_nvrtc()
    if torch.version.cuda is None:
        raise ConfigError(
            f"PyTorch {torch.__version__} is built without CUDA, and {card.name} needs it",
            f"install a CUDA build of PyTorch, or {USE_CPU}",
        )
    return card


def open_device(index: int, *, cap_bytes: int | None = None, home: Home | None = None) -> CudaDevice:
    """Opens card ``index``; ``cap_bytes`` is ``--vram-gib``. ``home`` keeps compiled kernels, None: the user's.

    Raises as ``check_card``, and ``EngineError`` in CUDA's words where the card refuses a context.
    """
    card = check_card(index)
    driver, _ = start()
    context = CudaContext(driver, card)
    try:
        machine = CudaMachine(context, home)
    except BaseException:
        context.close()
        raise
    return CudaDevice(context, machine, CudaBackend(context, cap_bytes))


class _Bytes:
    """A buffer as torch takes foreign device memory."""

    def __init__(self, buffer: CudaBuffer) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 3,
        }
