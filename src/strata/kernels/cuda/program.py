"""A list of kernel launches and the memory that they use: what a decode round on a GPU is made of.

Lives in ``kernels/cuda`` because launches are this room's. A program is recorded once, by running a model's layers on
operations that record instead of computing, and then run any number of times: as one captured graph on a card, or
launch by launch. Nothing in it depends on values: what changes from round to round (token ids, the position, how many
rows of the last window were accepted) is read from device memory, see ``RoundInputs``. It must not know models, tiers,
or what runs a launch.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from strata.kernels.cuda.cache_rows import IndexRows, KeyValueRows
    from strata.kernels.cuda.records import DeltaRecord, TailRecord

__all__ = [
    "MAX_WINDOW",
    "Address",
    "Argument",
    "Launch",
    "Machine",
    "Program",
    "ProgramMemory",
    "RoundInputs",
    "Runnable",
    "TimedLaunch",
]

MAX_WINDOW = 8  # rows of a window at most: kernels keep so many sums in registers


class Address(int):
    """A device address as an argument, where there is no tensor."""


Argument = torch.Tensor | Address | int | float | ctypes.Structure
"""A tensor is passed as its address (64 bits), an ``Address`` as 64 bits, an int as 32, a float as FP32, a structure
by value."""


@dataclass(frozen=True, eq=False)
class Launch:
    """``kernel`` is "file.entry", an ``extern "C"`` kernel of ``file.cu``. ``shared``: dynamic shared memory, bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: tuple[Argument, ...]


class ProgramMemory:
    """Device memory that programs use in turn: no two of them run at once, and each writes what it reads. Owns it.

    A program takes the smallest block that is large enough and that it has not taken yet. Programs of many rows are
    best recorded first, so that those of fewer find room in their blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []  # by size

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def blocks(self) -> list[torch.Tensor]:
        """What a program that begins may take of, by size."""
        return list(self._blocks)

    def take(self, nbytes: int, free: list[torch.Tensor]) -> torch.Tensor:
        """``nbytes`` of one of the ``free`` blocks, which leaves that list, else of a new one."""
        first = bisect_left(free, nbytes, key=lambda block: block.nbytes)
        if first < len(free):
            return free.pop(first)[:nbytes]
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        insort(self._blocks, block, key=lambda one: one.nbytes)
        return block


@dataclass(eq=False)
class Program:
    """Launches in order. ``empty`` and ``zeros`` allocate on the device and live as long as the program; with
    ``memory``, ``empty`` takes of it.

    ``tails`` and ``deltas`` are what a sequence keeps between rounds, by the address of the tensor that layers hand on
    for it (a tail's stand-in, a state); ``recorded``: the address of the rows that a launch puts into such a tail.
    """

    device: torch.device
    multiprocessors: int = 1
    # Rows that a layer has handed to its caches and no launch has written yet; indexed ones by the address of the
    # tensor that stands for their blocks.
    appended: list[KeyValueRows] = field(default_factory=list)
    indexed: dict[int, IndexRows] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    tails: dict[int, TailRecord] = field(default_factory=dict)
    deltas: dict[int, DeltaRecord] = field(default_factory=dict)
    recorded: dict[int, int] = field(default_factory=dict)
    memory: ProgramMemory | None = None
    zeroed_bytes: int = 0  # of ``zeros``, whose first values launches may count on: no other program may use them
    _free: list[torch.Tensor] | None = None  # blocks of ``memory`` that it has not taken

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if self.memory is None or not nbytes:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            if self._free is None:
                self._free = self.memory.blocks()
            tensor = self.memory.take(nbytes, self._free).view(dtype).view(shape)
        self.kept.append(tensor)
        return tensor

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        self.kept.append(tensor)
        self.zeroed_bytes += tensor.nbytes
        return tensor

    def launch(self, kernel: str, grid: tuple[int, ...], block: int, *arguments: Argument, shared: int = 0) -> None:
        """Appends a launch; tensors among the arguments must be contiguous and stay alive with the program."""
        whole = (*grid, 1, 1)[:3]
        assert min(whole) > 0, (kernel, grid)
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert argument.is_contiguous(), f"{kernel}: a tensor of stride {argument.stride()}"
                assert argument.device.type == self.device.type, f"{kernel}: a tensor on {argument.device}"
                self.kept.append(argument)
        self.launches.append(Launch(kernel, (whole[0], whole[1], whole[2]), block, shared, arguments))

    def take(self) -> list[Launch]:
        """The launches so far, which the program forgets; their memory stays with it."""
        taken, self.launches = self.launches, []
        return taken


@dataclass(frozen=True, eq=False)
class RoundInputs:
    """What a round reads from device memory, int32; written by the conductor between rounds. Owns its tensors.

    ``ids`` [MAX_WINDOW]: the window's tokens. ``position`` [1]: committed positions, where the window starts.
    ``accepted`` [1]: how many rows of the window before are to be folded into recurrent state. ``turn`` [1]: which of
    its two copies the window before has written (``records``), 0 or 1.
    """

    ids: torch.Tensor
    position: torch.Tensor
    accepted: torch.Tensor
    turn: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> RoundInputs:
        """All as views of one tensor, so that one copy fills them."""
        whole = torch.zeros(MAX_WINDOW + 3, dtype=torch.int32, device=device)
        return cls(whole[3:], whole[:1], whole[1:2], whole[2:3])


@dataclass(frozen=True)
class TimedLaunch:
    """One launch of ``run_timed``: microseconds from what it waits for being complete to the next one's."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    microseconds: float


class Runnable(Protocol):
    """Launches that are ready to run in order."""

    def run(self) -> None:
        """Enqueues them on the machine's stream; returns before they are complete."""


class Machine(Protocol):
    """What runs launches: a card (``device.py``), or the tests' emulation on the CPU."""

    device: torch.device
    multiprocessors: int
    cache_bytes: int  # of the second level

    def prepare(self, launches: list[Launch]) -> Runnable:
        """Loads every kernel and captures the launches as one graph where the machine has graphs."""

    def run_timed(self, launches: list[Launch]) -> list[TimedLaunch]:
        """Runs the launches once and waits: where a round spends its time."""

    def synchronize(self) -> None:
        """Waits for everything enqueued. Raises ``EngineError`` if any of it failed."""
