"""The exact expert kernel: one native call for all experts of a layer that the CPU computes.

Lives here because it binds native code; where blobs lie and which experts go to the CPU is the caller's matter.
The arithmetic is defined in ``csrc/cpu/exact.h`` (decision record 0010): the same bits for every instruction set,
number of rows, number of threads and split of the work.

Legend: T rows of x, K picks of a row, H hidden width, N tasks (one an expert), P picks of the call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import check, declare
from strata.quant.layout import ExpertLayout

__all__ = ["TASK", "ExpertKernel", "ExpertTasks", "group_picks"]

TASK = np.dtype([("blob", "<u8"), ("scales", "<f4", (3,)), ("first", "<i4"), ("count", "<i4"), ("row", "<i4")])
"""One expert of a call, as native code reads it: the blob's address (aligned to 64 bytes), the tensor scales of gate,
up and down, its picks ``[first, first + count)``, and the row of the first of them (which only a GPU reads)."""

_FORMATS = {"nvfp4": 0, "q8_0": 1, "bf16": 2}


@dataclass(frozen=True, eq=False)
class ExpertTasks:
    """What one call computes. Arrays are contiguous; ``blob`` and ``scales`` of ``tasks`` are filled by the caller.

    ``experts``: int32 [N], the expert of each task, ascending. ``tasks``: ``TASK`` [N]. ``rows``, ``slots``: int32
    [P]: pick p is row ``rows[p]`` of x and its result goes to place ``slots[p]`` of the output.
    """

    experts: npt.NDArray[np.int32]
    tasks: npt.NDArray[np.void]
    rows: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]

    def place(self, addresses: npt.NDArray[np.uint64], scales: npt.NDArray[np.float32]) -> None:
        """Fills blobs and tensor scales from tables over all experts: addresses [E], scales [E, 3]."""
        self.tasks["blob"] = addresses[self.experts]
        self.tasks["scales"] = scales[self.experts]


def group_picks(ids_TK: npt.NDArray[np.int32], wanted: npt.NDArray[np.bool_] | None = None) -> ExpertTasks:
    """Groups the picks of a window by expert, rows ascending; pick (t, k) gets row t and slot t * K + k.

    ``wanted`` [E]: only experts that are true get a task. Blobs and scales are left zero.
    """
    flat = np.ascontiguousarray(ids_TK, dtype=np.int32).reshape(-1)
    order = np.argsort(flat, kind="stable")
    if wanted is not None:
        order = order[wanted[flat[order]]]
    grouped = flat[order]
    starts = np.flatnonzero(np.diff(grouped, prepend=-1)) if len(grouped) else np.empty(0, np.int64)
    tasks = np.zeros(len(starts), TASK)
    tasks["first"] = starts
    tasks["count"] = np.diff(starts, append=len(grouped))
    slots = order.astype(np.int32)
    rows = slots // np.int32(ids_TK.shape[1])
    tasks["row"] = rows[starts]
    return ExpertTasks(grouped[starts], tasks, rows, slots)


@cache
def _compute_function() -> ctypes._NamedFuncPointer:
    number, address = ctypes.c_long, ctypes.c_void_p
    return declare(
        "strata_expert_compute", number, number, ctypes.c_int, address, number, address, address, number,
        address, number, address, number, address,
    )  # fmt: skip


@cache
def _combine_function() -> ctypes._NamedFuncPointer:
    number, address = ctypes.c_long, ctypes.c_void_p
    return declare("strata_expert_combine", address, address, number, number, number, address, address)


def _require(tensor: torch.Tensor, name: str, width: int) -> int:
    """The number of rows of ``width`` in a contiguous FP32 CPU tensor."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise EngineError(f"{name} must be a contiguous FP32 tensor in RAM, not {tensor.dtype} on {tensor.device}")
    if tensor.shape[-1] != width:
        raise EngineError(f"{name} has rows of {tensor.shape[-1]}, the experts are {width} wide")
    return tensor.numel() // width


class ExpertKernel:
    """Computes experts of one layout. Stateless but for scratch that each calling thread keeps; calls may overlap."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout = layout
        self._shape = (layout.hidden, layout.intermediate, _FORMATS[layout.format])

    def compute(
        self, tasks: ExpertTasks, x_TH: torch.Tensor, out: torch.Tensor, flags: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """Writes expert(x[rows[p]]) to ``out`` (viewed as rows of H) at ``slots[p]``, for every pick.

        Returns the flags, uint8 [T]: 1 where a row held, or led to, a number that is not finite (its results are
        defined all the same); ``flags`` given are added to in place. Blobs are read during the call alone. Raises
        ``EngineError`` for what native code refuses: an address that is null or not aligned to 64 bytes, a row or
        slot out of range, a tensor scale that is not finite and above zero.
        """
        hidden = self.layout.hidden
        x_rows, slots = _require(x_TH, "x", hidden), _require(out, "out", hidden)
        flags = np.zeros(x_rows, np.uint8) if flags is None else flags
        if len(flags) < x_rows:
            raise EngineError(f"{len(flags)} flags for {x_rows} rows")
        check(
            _compute_function()(
                *self._shape, tasks.tasks.ctypes.data, len(tasks.tasks), tasks.rows.ctypes.data,
                tasks.slots.ctypes.data, len(tasks.rows), x_TH.data_ptr(), x_rows, out.data_ptr(), slots,
                flags.ctypes.data,
            )
        )  # fmt: skip
        return flags

    def combine(
        self, parts_TKH: torch.Tensor, weights_TK: torch.Tensor, flags: npt.NDArray[np.uint8] | None = None
    ) -> torch.Tensor:
        """y_TH, a new tensor: the sum over k, in router order, by fused multiply-add from zero, of weight * part.

        A result that is not finite is 0 and sets the row's flag.
        """
        rows, picks = weights_TK.shape
        hidden = self.layout.hidden
        if _require(parts_TKH, "parts", hidden) != rows * picks or _require(weights_TK, "weights", picks) != rows:
            raise EngineError(f"{tuple(parts_TKH.shape)} parts for {rows} rows of {picks} picks")
        y = torch.empty(rows, hidden, dtype=torch.float32)
        flags = np.zeros(rows, np.uint8) if flags is None else flags
        check(
            _combine_function()(
                parts_TKH.data_ptr(), weights_TK.data_ptr(), rows, picks, hidden, y.data_ptr(), flags.ctypes.data
            )
        )
        return y

    def scratch_bytes(self, rows: int, picks: int) -> int:
        """Bytes that a calling thread keeps after a call of that size."""
        size = declare("strata_expert_scratch_bytes", *[ctypes.c_long] * 2, ctypes.c_int, *[ctypes.c_long] * 2,
                       returns=ctypes.c_long)  # fmt: skip
        return int(size(*self._shape, rows, picks))
