"""Memory that weights are read into: fresh for each of them, or a thread's own one again and again.

Lives in ``checkpoint`` beside the readers. While RAM is page-locked every new mapping of a process waits for the slice
that is being locked, so a load whose weights go to a card takes memory once. It must not know what a weight is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["ByteArray", "ReusedMemory", "TakeMemory", "fresh_memory"]

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
TakeMemory = Callable[[int], ByteArray]

_ALIGNMENT = 64
_LEAST_BYTES = 32 << 20
_KEPT_BYTES = 64 << 20  # a larger block is for one weight alone


def fresh_memory(nbytes: int) -> ByteArray:
    """Of nobody else; numpy asks the system for huge pages. Raises ``MemoryError``."""
    return np.empty(nbytes, np.uint8)


class ReusedMemory:
    """One block, grown when a weight needs more. One thread uses it."""

    def __init__(self) -> None:
        self._block, self._taken = fresh_memory(0), 0

    def restart(self) -> None:
        """What was taken may be overwritten from now on."""
        self._taken = 0
        if self._block.nbytes > _KEPT_BYTES:
            self._block = fresh_memory(0)

    def take(self, nbytes: int) -> ByteArray:
        """``nbytes`` until the next ``restart``. Raises ``MemoryError``."""
        start = -(-self._taken // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._block.nbytes:
            # What was taken of the old block keeps it.
            self._block, start = fresh_memory(max(_LEAST_BYTES, nbytes + nbytes // 8)), 0
        self._taken = start + nbytes
        return self._block[start : self._taken]
