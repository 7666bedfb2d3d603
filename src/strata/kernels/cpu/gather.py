"""Gathers rows of a table file (``csrc/cpu/gather.h`` defines it).

Lives beside the native kernels because it runs on their pool: a prompt reads tens of thousands of rows, a disk wants
many reads at once. It must not know what the rows hold.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.errors import CheckpointError
from strata.kernels.cpu.library import declare

__all__ = ["gather_rows"]


def gather_rows(descriptor: int, row_bytes: int, ids: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.uint8]:
    """N x row_bytes: the rows ``ids`` of an open file, each checked. Releases the GIL.

    ``name`` opens the line of the ``CheckpointError`` for a row that is damaged or cannot be read.
    """
    numbers = np.ascontiguousarray(ids, dtype=np.int64)
    rows: np.ndarray[Any, np.dtype[np.uint8]] = np.empty((numbers.size, row_bytes), dtype=np.uint8)
    bad_row, bad_errno = ctypes.c_int64(), ctypes.c_int()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call = declare("strata_gather_rows", ctypes.c_int, number, pointer, number, pointer, pointer, pointer)
    status = call(
        descriptor,
        row_bytes,
        numbers.ctypes.data,
        numbers.size,
        rows.ctypes.data,
        ctypes.byref(bad_row),
        ctypes.byref(bad_errno),
    )
    if status == 0:
        return rows
    if bad_errno.value > 0:
        raise CheckpointError(f"{name}: row {bad_row.value} cannot be read: {os.strerror(bad_errno.value)}")
    what = "is damaged" if bad_errno.value < 0 else "is past the end of the file"
    raise CheckpointError(f"{name}: row {bad_row.value} {what}", "make the pack again with strata pack")
