"""Rows of a gathered table: how a row is written into its bytes, and the file that gathers them back.

Lives in ``checkpoint`` because the table stays in its file: it is far larger than memory, and a token needs a few rows
of it. A row holds its own scale and check word, so gathering it needs one read and finds any flipped byte.
It must not know what the rows mean.

Row: the payload, zeros up to a multiple of 4 bytes, then the check word (``row_checks``), little-endian.
Payloads: f32 and bf16 the values; q8_0 int8 codes padded to 32, then an FP16 scale per 32; f8_e4m3 codes, zeros up to a
multiple of 4, then one FP32 scale.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from strata.checkpoint.pack_checksum import row_checks
from strata.checkpoint.recognise import unreadable
from strata.errors import CheckpointError
from strata.files import open_regular
from strata.kernels.cpu.gather import TableFormat, gather_rows, table_row_bytes
from strata.kernels.cpu.packing import quantise

__all__ = ["TableFile", "TableFormat", "encode_rows", "row_bytes"]

ByteRows = np.ndarray[Any, np.dtype[np.uint8]]


def row_bytes(columns: int, format: TableFormat) -> int:
    """Bytes of one row, its check word included."""
    return table_row_bytes(columns, format)


def encode_rows(values: torch.Tensor, format: TableFormat, first_row: int, scales: torch.Tensor | None) -> ByteRows:
    """N x row_bytes of rows ``first_row ...``. ``values`` N x columns: float, or float8_e4m3fn codes with FP32
    ``scales`` (N) for f8_e4m3."""
    count, columns = values.shape
    rows = np.zeros((count, row_bytes(columns, format)), dtype=np.uint8)
    if format == "f32":
        _place(rows, 0, values.float())
    elif format == "bf16":
        _place(rows, 0, values.to(torch.bfloat16))
    elif format == "q8_0":
        matrix = quantise(values, "q8_0")
        assert matrix.scales is not None
        _place(rows, 0, matrix.codes)
        _place(rows, 32 * matrix.scales.shape[1], matrix.scales)
    else:
        assert scales is not None
        assert values.dtype == torch.float8_e4m3fn
        _place(rows, 0, values)
        _place(rows, -(-columns // 4) * 4, scales.float().reshape(-1, 1))
    numbers = np.arange(first_row, first_row + count, dtype=np.int64)
    rows[:, -4:] = row_checks(rows[:, :-4], numbers).astype("<u4").reshape(-1, 1).view(np.uint8)
    return rows


def _place(rows: ByteRows, offset: int, tensor: torch.Tensor) -> None:
    data = tensor.contiguous().view(torch.uint8).numpy()
    rows[:, offset : offset + data.shape[1]] = data


class TableFile:
    """A table of a pack, gathered row by row from its file. Owns the open file; ``close()`` or ``with`` ends it."""

    def __init__(self, path: Path, rows: int, columns: int, format: TableFormat) -> None:
        self.path, self.rows, self.columns, self.format = path, rows, columns, format
        self.row_bytes = row_bytes(columns, format)
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise unreadable(path, error) from error

    def gather(self, rows_TK: npt.NDArray[np.int64], out_TX: torch.Tensor | None = None) -> torch.Tensor:
        """FP32 T x (K * columns): the K rows of each token side by side, in ``out_TX`` where it is given.

        Raises ``CheckpointError`` for a damaged row.
        """
        numbers = rows_TK.reshape(-1)
        if out_TX is not None:
            gather_rows(self._file, self.format, self.columns, numbers, str(self.path), out_TX.numpy())
            return out_TX
        if numbers.size == 0:
            return torch.empty(rows_TK.shape[0], rows_TK.shape[1] * self.columns)
        assert int(numbers.min()) >= 0
        assert int(numbers.max()) < self.rows
        return self._gather(numbers).reshape(rows_TK.shape[0], -1)

    def check(self, rows_at_once: int = 1 << 16) -> int:
        """Reads and checks every row, its values too; returns the bytes read."""
        for first in range(0, self.rows, rows_at_once):
            values = self.read_rows(first, min(rows_at_once, self.rows - first))
            low, high = torch.aminmax(values)  # a NaN reaches both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise CheckpointError(
                    f"{self.path}: rows {first} to {first + len(values)} hold values that are not finite",
                    "make the pack again with strata pack",
                )
        return self.rows * self.row_bytes

    def read_rows(self, first: int, count: int) -> torch.Tensor:
        """FP32 count x columns of consecutive rows, checked."""
        return self._gather(np.arange(first, first + count, dtype=np.int64))

    def _gather(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(gather_rows(self._file, self.format, self.columns, numbers, str(self.path)))

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
