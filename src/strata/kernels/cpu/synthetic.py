"""Weights that are computed instead of read (``csrc/cpu/synthetic.h`` defines them): blobs, dense values, table rows.

Lives beside the other native bindings; the stager's threads run the same functions. Every byte is a function of a key
and its place, the same on every machine and for any number of threads. It must not know a model or a tier.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from strata.kernels.cpu.gather import table_row_bytes
from strata.kernels.cpu.library import check, declare, library
from strata.quant.layout import ExpertLayout

__all__ = ["RMS_OF_CODES", "BlobRecipe", "compute_blob", "compute_rows", "compute_values", "key_of", "recipe_of"]

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
_TYPES = {torch.int8: 0, torch.bfloat16: 1, torch.float32: 2}
_ALL = (1 << 64) - 1

# What codes and scales are and-ed and or-ed with. Every NVFP4 code is valid; scales are E4M3 0.5 to 0.94 (codes 0x30 to
# 0x37). Every Q8_0 code, -128 included; scales are FP16 of 2^-14. BF16: +-2^-7 to +-2^-6. NVFP4 alone has tensor scales
# to choose a size with; the others are small enough for any width. All of them are exact in BF16.
_MASKS = {
    "nvfp4": (_ALL, 0, 0x0707070707070707, 0x3030303030303030),
    "q8_0": (_ALL, 0, 0, 0x0400040004000400),
    "bf16": (0x807F807F807F807F, 0x3C003C003C003C00, _ALL, 0),
}
RMS_OF_CODES = {"nvfp4": 2.927 * 0.732, "q8_0": 73.9 * 2**-14, "bf16": 0.764 * 2**-6}
"""Root mean square of a computed weight before its tensor scale."""


@dataclass(frozen=True)
class BlobRecipe:
    """What computes one blob: a ``StrataFill`` by its address, and its words."""

    fill: int
    words: tuple[int, ...]


def key_of(seed: int, name: str) -> int:
    """The 64-bit key of a weight."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


@cache
def _blob_function() -> int:
    address = ctypes.cast(library().strata_synthetic_blob, ctypes.c_void_p).value
    assert address is not None
    return address


def recipe_of(layout: ExpertLayout, key: int) -> BlobRecipe:
    """The recipe of an expert. Both widths must be multiples of 64: padding would have to be zeros."""
    assert layout.hidden % 64 == 0, layout
    assert layout.intermediate % 64 == 0, layout
    sizes = (layout.payload_bytes, layout.superblock_bytes, layout.code_bytes)
    return BlobRecipe(_blob_function(), (key, *sizes, *_MASKS[layout.format]))


def compute_blob(recipe: BlobRecipe, nbytes: int) -> ByteArray:
    """One blob in fresh memory, on the calling thread."""
    memory = np.empty(nbytes + 64, np.uint8)
    blob = memory[-memory.ctypes.data % 64 :][:nbytes]
    call = declare("strata_synthetic_blob", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    words = (ctypes.c_uint64 * len(recipe.words))(*recipe.words)
    check(call(blob.ctypes.data, nbytes, words))
    return blob


def compute_values(
    shape: tuple[int, ...],
    key: int,
    amplitude: int,
    exponent: int,
    dtype: torch.dtype,
    first: int = 0,
    memory: Callable[[int], ByteArray] | None = None,
) -> torch.Tensor:
    """Whole numbers in [-amplitude, amplitude] times 2^exponent, exact in every ``dtype``; int8 holds the numbers
    themselves. ``first`` is the place of the first value, a multiple of 8. Runs on the
    calling thread: a load has a thread for each of several weights.

    In ``memory``, asked for a number of bytes, or in fresh memory of numpy's, which has huge pages: page faults in
    torch's took two thirds of the whole.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.empty(nbytes, np.uint8) if memory is None else memory(nbytes)
    values = torch.from_numpy(data).view(dtype).view(shape)
    number, integer = ctypes.c_long, ctypes.c_int
    call = declare(
        "strata_synthetic_values", ctypes.c_void_p, number, number, ctypes.c_uint64, integer, integer, integer
    )
    check(call(values.data_ptr(), first, values.numel(), key, amplitude, exponent, _TYPES[dtype]))
    return values


def compute_rows(rows: ByteArray, first: int, columns: int, key: int, amplitude: int, exponent: int) -> None:
    """Fills ``rows`` (count x row_bytes, contiguous) with rows of a q8_0 table as its file holds them. Runs on the
    pool."""
    count, nbytes = rows.shape
    assert rows.flags.c_contiguous
    assert nbytes == table_row_bytes(columns, "q8_0"), (nbytes, columns)
    number, integer = ctypes.c_int64, ctypes.c_int
    call = declare("strata_synthetic_table", ctypes.c_void_p, number, number, number, ctypes.c_uint64, integer, integer)
    check(call(rows.ctypes.data, first, count, columns, key, amplitude, exponent))
