"""What the recording operations share: the program, the round's inputs, scratch memory, sizes of grids.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import MAX_WINDOW, Address, Argument, Program, RoundInputs

__all__ = ["Ahead", "Recorder", "agree", "blocks_of"]

FULL_CACHE = 48 << 20  # bytes of second-level cache from which on launches bring all that they have time for
MOST_CARRIERS = 6  # launches back that weights are brought at most
PARTS_AHEAD = 4
CACHE_LINE = 128  # bytes
MOST_OF_BLOCK = 128 << 10
_WAVES = 4  # blocks of a multiprocessor that a grid-stride launch asks for at most


class _Inputs(ctypes.Structure):
    """``Inputs`` of rows.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("ids", "position", "accepted"))


def agree(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise EngineError(f"{what}: {found} and {expected} do not agree")


def blocks_of(count: int, threads: int) -> int:
    return max(1, -(-count // threads))


class Ahead(ctypes.Structure):
    """``Ahead`` of device.h."""

    _fields_ = (
        ("at", ctypes.c_uint64 * PARTS_AHEAD),
        *((name, ctypes.c_uint32 * PARTS_AHEAD) for name in ("bytes", "run")),
    )


@dataclass(eq=False)
class _Carrier:
    ahead: Ahead
    left: int
    askers: int
    parts: int = 0

    def take(self, start: int, nbytes: int) -> int:
        """How many of the bytes from ``start`` on this launch brings."""
        taken = min(nbytes, self.left) // 16 * 16
        if taken <= 0 or self.parts == PARTS_AHEAD:
            return 0
        self.ahead.at[self.parts], self.ahead.bytes[self.parts] = start, taken
        self.ahead.run[self.parts] = (taken // self.askers // CACHE_LINE + 1) * CACHE_LINE
        self.parts += 1
        self.left -= taken
        return taken


@dataclass(frozen=True, eq=False)
class _PutOff:
    kind: str
    result: torch.Tensor
    record: Callable[[], None]
    parts: tuple[Any, ...]


class Recorder:
    """Appends launches to ``program``. ``shared_bytes``: shared memory that one block may use; ``cache_bytes``: of the
    card's second level."""

    def __init__(
        self, program: Program, inputs: RoundInputs, shared_bytes: int = 48 << 10, cache_bytes: int = 0
    ) -> None:
        self.program = program
        self.shared_bytes = shared_bytes
        self.turn = inputs.turn
        self._cache_bytes = cache_bytes
        self._carriers: list[_Carrier] = []
        self._waiting: _PutOff | None = None
        self._scratch: dict[str, torch.Tensor] = {}
        self.inputs = _Inputs(inputs.ids.data_ptr(), inputs.position.data_ptr(), inputs.accepted.data_ptr())
        program.kept += [inputs.ids, inputs.position, inputs.accepted, inputs.turn]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.program.empty(*shape, dtype=dtype)

    def scratch(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory that is dead after the launches of one operation: launches run in order, so all share it."""
        count = math.prod(shape)
        found = self._scratch.get(name)
        if found is None or found.numel() < count:
            found = self._scratch[name] = self.empty(count, dtype=dtype)
        return found[:count].view(shape)

    def address(self, tensor: torch.Tensor | None) -> int:
        """For a structure's field; the tensor is kept as long as the program. None is a null pointer."""
        if tensor is None:
            return 0
        assert tensor.is_contiguous(), f"a tensor of stride {tensor.stride()}"
        self.program.kept.append(tensor)
        return tensor.data_ptr()

    @staticmethod
    def pointer(address: int | None) -> Address:
        """An address as an argument of a launch."""
        return Address(address or 0)

    def ahead(self, nbytes: int, blocks: int) -> Ahead:
        """An argument of a launch to come, of so many blocks, that leaves time to bring ``nbytes`` of later weights to
        the cache. A multiprocessor asks for ``MOST_OF_BLOCK`` in that time at most."""
        share = min(1.0, self._cache_bytes / FULL_CACHE)
        nbytes = min(int(nbytes * share), min(blocks, self.program.multiprocessors) * MOST_OF_BLOCK)
        self._carriers.append(_Carrier(Ahead(), nbytes, blocks))
        del self._carriers[:-MOST_CARRIERS]
        return self._carriers[-1].ahead

    def bring(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Has the launches before bring these weights, the latest of them first."""
        for tensor in tensors:
            if tensor is None or tensor.data_ptr() % 16 or not self._cache_bytes:
                continue
            start, left = tensor.data_ptr(), tensor.numel() * tensor.element_size() // 16 * 16
            for carrier in reversed(self._carriers):
                taken = carrier.take(start, left)
                start, left = start + taken, left - taken

    def launch(self, kernel: str, grid: tuple[int, ...], block: int, *arguments: Argument, shared: int = 0) -> None:
        """Appends a launch, after what was put off."""
        self.settle()
        self.program.launch(kernel, grid, block, *arguments, shared=shared)

    def put_off(
        self, kind: str, result: torch.Tensor, record: Callable[[], None], *parts: Any, after: str | None = None
    ) -> torch.Tensor:
        """Leaves an operation to the one that reads its result, which may do it in its own launch (``take``). Any other
        launch of this object comes after ``record``. Only results that no launch of others reads are put off.

        ``after``: the kind of an operation that may wait with it, whose parts (or None) then come last.
        """
        before = self._waiting
        if after is None or before is None or before.kind != after:
            self.settle()
            before = None
        else:
            self._waiting = None
        if after is not None:
            parts = (*parts, None if before is None else before.parts)

        def both() -> None:
            if before is not None:
                before.record()
            record()

        self._waiting = _PutOff(kind, result, both, parts)
        return result

    def take(self, kind: str, result: torch.Tensor) -> tuple[Any, ...] | None:
        """The parts of the operation that was put off, if ``result`` is its whole result: the caller does it then."""
        waiting = self._waiting
        if waiting is None or waiting.kind != kind or waiting.result.data_ptr() != result.data_ptr():
            return None
        if waiting.result.numel() != result.numel():
            return None
        self._waiting = None
        return waiting.parts

    def waiting(self, kind: str) -> tuple[Any, ...] | None:
        """The parts of what was put off, if it is of this kind: more may join it."""
        waiting = self._waiting
        return None if waiting is None or waiting.kind != kind else waiting.parts

    def settle(self) -> None:
        """Records what was put off."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.record()

    def rows_of(self, x: torch.Tensor) -> int:
        rows = int(x.shape[0])
        if not 1 <= rows <= MAX_WINDOW:
            raise EngineError(f"a recorded round of {rows} rows: 1 to {MAX_WINDOW} are recorded")
        return rows

    def stride_blocks(self, count: int, threads: int) -> int:
        """Blocks of a launch whose threads stride over ``count`` elements."""
        return min(blocks_of(count, threads), self.program.multiprocessors * _WAVES)
