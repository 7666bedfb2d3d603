"""EmulatedMachine: runs programs of kernels/cuda on the CPU, launch by launch, as ``Machine`` of program.py.

Memory is torch's on the CPU. ``EmulatedProgram`` gives memory that starts as 0xFF bytes (NaN, -1) and stands between
guards, so that values that were never written, and writes past an end, are seen.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import Address, Argument, Launch, Program, TimedLaunch
from tests.emulator.compile import load

__all__ = ["EmulatedMachine", "EmulatedProgram"]

GUARD = 256  # bytes on either side of a tensor
GUARD_BYTE = 0xA7


class EmulatedProgram(Program):
    """A program whose new memory is poisoned and guarded."""

    def __init__(self, multiprocessors: int = 3) -> None:
        super().__init__(torch.device("cpu"), multiprocessors)
        self._guarded: list[tuple[torch.Tensor, int]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        whole = torch.full((GUARD + -(-size // GUARD) * GUARD + GUARD,), GUARD_BYTE, dtype=torch.uint8)
        whole[GUARD : GUARD + size] = 0xFF
        self._guarded.append((whole, size))
        return whole[GUARD : GUARD + size].view(dtype).view(shape)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.empty(*shape, dtype=dtype).zero_()

    def check_guards(self) -> None:
        for whole, size in self._guarded:
            before, after = whole[:GUARD], whole[GUARD + size :]
            assert bool((before == GUARD_BYTE).all()), f"a write before a tensor of {size} bytes"
            assert bool((after == GUARD_BYTE).all()), f"a write past a tensor of {size} bytes"


class _Prepared:
    def __init__(self, calls: list[tuple[Launch, _Call]], machine: EmulatedMachine) -> None:
        self._calls = calls
        self._machine = machine

    def run(self) -> None:
        for launch, call in self._calls:
            problem = call(self._machine.backward, self._machine.late)
            if problem is not None:
                self._machine.problems.append(f"{launch.kernel}: {problem}")
                return


class _Call:
    """One launch, its arguments kept as the kernel's C function takes them."""

    def __init__(self, launch: Launch) -> None:
        file, _, entry = launch.kernel.partition(".")
        self._source = load(file)
        self._function = self._source.entry(entry)
        self._values = [_as_c(argument) for argument in launch.arguments]
        count = len(self._values)
        letters = "".join(letter for letter, _ in self._values).encode()
        sizes = (ctypes.c_int * max(1, count))(*[ctypes.sizeof(value) for _, value in self._values])
        addresses = (ctypes.c_void_p * max(1, count))(*[ctypes.addressof(value) for _, value in self._values])
        self._arguments = (letters, sizes, addresses, (ctypes.c_int * 3)(*launch.grid), launch.block, launch.shared)

    def __call__(self, backward: bool, late: Sequence[tuple[torch.Tensor, int]]) -> str | None:
        self._source.set_late([(word.data_ptr(), before) for word, before in late])
        return self._source.message() if self._function(*self._arguments, int(backward)) else None


def _as_c(argument: Argument) -> tuple[str, ctypes._SimpleCData[int] | ctypes.c_float | ctypes.Structure]:
    if isinstance(argument, torch.Tensor):
        return "p", ctypes.c_uint64(argument.data_ptr())
    if isinstance(argument, Address):
        return "p", ctypes.c_uint64(argument)
    if isinstance(argument, bool) or not isinstance(argument, int | float | ctypes.Structure):
        raise TypeError(f"an argument of {type(argument)}")
    if isinstance(argument, int):
        return "i", ctypes.c_int(argument)
    if isinstance(argument, float):
        return "f", ctypes.c_float(argument)
    return "s", argument


class EmulatedMachine:
    """``backward`` runs the blocks of a grid and the threads of a block in the opposite order: what depends on an
    order that a GPU does not promise then gives other results. ``late``: int32 words (of one element) that every launch
    sees with an older value until it has waited for the launch before."""

    def __init__(self, *, backward: bool = False, multiprocessors: int = 3) -> None:
        self.device = torch.device("cpu")
        self.multiprocessors = multiprocessors
        self.cache_bytes = 48 << 20
        self.backward = backward
        self.problems: list[str] = []
        self.late: Sequence[tuple[torch.Tensor, int]] = ()

    def prepare(self, launches: list[Launch]) -> _Prepared:
        return _Prepared([(launch, _Call(launch)) for launch in launches], self)

    def run_timed(self, launches: list[Launch]) -> list[TimedLaunch]:
        """The emulation's own time, which says nothing of a card's."""
        timed = []
        for launch in launches:
            began = time.perf_counter()
            self.prepare([launch]).run()
            timed.append(TimedLaunch(launch.kernel, launch.grid, launch.block, 1e6 * (time.perf_counter() - began)))
        self.synchronize()
        return timed

    def synchronize(self) -> None:
        """Raises ``EngineError`` for the first launch that failed since the last call."""
        problems, self.problems = self.problems, []
        if problems:
            raise EngineError(problems[0])
