"""Checks of a pack's large contents: dense tensors in pieces, table rows each for itself.

Lives in ``checkpoint`` because writer and reader must agree on it. Blobs of experts use the native checksum
alone (``kernels/cpu/checksum``). It must not know files.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from strata.kernels.cpu.checksum import checksum

__all__ = ["PIECE_BYTES", "combine_pieces", "row_checks", "tensor_checksum"]

PIECE_BYTES = 16 << 20
ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
WordArray = np.ndarray[Any, np.dtype[np.uint32]]


def combine_pieces(sums: Iterable[int]) -> str:
    """The checksum, 16 hex digits, of an array from those of its pieces of ``PIECE_BYTES`` (the last is shorter)."""
    return f"{checksum(np.array(list(sums), dtype='<u8').view(np.uint8)):016x}"


def tensor_checksum(data: ByteArray) -> str:
    """``combine_pieces`` of an array held whole."""
    return combine_pieces(checksum(data[start : start + PIECE_BYTES]) for start in range(0, data.nbytes, PIECE_BYTES))


@cache
def _row_weights(nbytes: int) -> WordArray:
    return (np.arange(1, nbytes + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)) | np.uint32(1)


def row_checks(rows: ByteArray, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> WordArray:
    """The 32-bit check word of each row (N x bytes) of a table, from its bytes and its row number.

    A byte's weight is odd and a byte changes by less than 256, so every changed byte changes the word.
    """
    place = numbers.astype(np.uint32) * np.uint32(0x85EBCA77) + np.uint32(0xC2B2AE3D)
    weighted: WordArray = rows.astype(np.uint32) @ _row_weights(rows.shape[1])
    return weighted + place
