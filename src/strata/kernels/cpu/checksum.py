"""The 64-bit checksum of an expert blob (``csrc/cpu/checksum.h`` defines it).

Lives beside the native kernels because the threads that copy blobs verify them; the pack writer uses the same
one. It must not know what the bytes mean. Every change confined to one 8-byte word, thus every flipped byte,
changes it; it is no defence against an attacker (sha256 guards the small files).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from strata.kernels.cpu.library import check, declare

__all__ = ["checksum", "checksum_at", "copy_with_checksum"]


def checksum_at(address: int, nbytes: int) -> int:
    """Checksum of ``nbytes`` at ``address``, which the caller keeps valid. Releases the GIL.

    Raises ``EngineError`` where they cannot be read, as in a mapped file that was cut.
    """
    call = declare("strata_checksum_of", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found = ctypes.c_uint64()
    check(call(address, nbytes, ctypes.byref(found)))
    return found.value


def checksum(data: np.ndarray[Any, np.dtype[np.uint8]] | bytes) -> int:
    """Checksum of a contiguous array of bytes."""
    array = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    assert array.dtype == np.uint8
    assert array.flags.c_contiguous
    return checksum_at(array.ctypes.data, array.nbytes)


def copy_with_checksum(target: int, source: int, nbytes: int) -> int:
    """Copies ``nbytes`` between addresses that do not overlap; returns the checksum of the bytes copied."""
    call = declare(
        "strata_copy_with_checksum", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, returns=ctypes.c_uint64
    )
    return int(call(target, source, nbytes))
