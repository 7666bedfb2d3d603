"""Gathers rows of a table file as FP32 (``csrc/cpu/gather.h`` defines it).

Lives beside the native kernels because it runs on their pool: a prompt reads tens of thousands of rows, a disk wants
many reads at once. It must not know what the rows mean.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from strata.errors import CheckpointError
from strata.kernels.cpu.library import check, declare

__all__ = ["TABLE_FORMATS", "TableFormat", "gather_rows", "table_row_bytes"]

TableFormat = Literal["f32", "bf16", "q8_0", "f8_e4m3"]
TABLE_FORMATS: tuple[TableFormat, ...] = ("f32", "bf16", "q8_0", "f8_e4m3")
_TASK_FAULT = 3


def table_row_bytes(columns: int, format: TableFormat) -> int:
    """Bytes of one row in the file, its check word included."""
    call = declare("strata_table_row_bytes", ctypes.c_int, ctypes.c_int64, returns=ctypes.c_int64)
    return int(call(TABLE_FORMATS.index(format), columns))


@cache
def _native_gather() -> ctypes._NamedFuncPointer:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return declare("strata_gather_rows", ctypes.c_int, ctypes.c_int, number, pointer, number, pointer, pointer, pointer)


def gather_rows(
    descriptor: int,
    format: TableFormat,
    columns: int,
    ids: npt.NDArray[np.int64],
    name: str,
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """N x columns: the rows ``ids`` of an open file, each checked and decoded, in ``out`` or fresh memory. Releases the
    GIL.

    ``name`` opens the line of the ``CheckpointError`` for a row that is damaged or cannot be read.
    """
    numbers = np.ascontiguousarray(ids, dtype=np.int64)
    rows: np.ndarray[Any, np.dtype[np.float32]]
    rows = np.empty((numbers.size, columns), dtype=np.float32) if out is None else out
    assert rows.flags.c_contiguous, "native code fills whole arrays"
    assert rows.size == numbers.size * columns, "memory of another size"
    bad_row, bad_errno = ctypes.c_int64(), ctypes.c_int()
    status = _native_gather()(
        descriptor,
        TABLE_FORMATS.index(format),
        columns,
        numbers.ctypes.data,
        numbers.size,
        rows.ctypes.data,
        ctypes.byref(bad_row),
        ctypes.byref(bad_errno),
    )
    if status != _TASK_FAULT:
        check(status)
        return rows
    if bad_errno.value > 0:
        raise CheckpointError(f"{name}: row {bad_row.value} cannot be read: {os.strerror(bad_errno.value)}")
    what = "is damaged" if bad_errno.value < 0 else "is past the end of the file"
    raise CheckpointError(f"{name}: row {bad_row.value} {what}", "make the pack again with strata pack")
