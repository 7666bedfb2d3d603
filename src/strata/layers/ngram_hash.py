"""Which rows of an n-gram table a token reads: hashes of the last tokens, one per head.

Lives in ``layers`` apart from the layer because the rows can be gathered on the host as soon as ids are known,
long before the layer runs. Pure integers: numpy's int64 wraps exactly as the published hash does. It must not know
models or where the table lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["NgramHash"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment, and its two mixing constants below
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MODULE_STEP = 10007  # how far the seeds of two modules lie apart
_FEW_ROWS = 8  # a decode round's: numpy's calls take 24 us for one row on `cpu2`, plain integers 5


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


@cache
def _primes_from(base: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes that are at least ``base``."""
    found: list[int] = []
    value = max(base, 2)
    while len(found) < count:
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            found.append(value)
        value += 1
    return tuple(found)


@dataclass(frozen=True)
class NgramHash:
    """The hash of one n-gram module. ``order`` is the longest n-gram; each order from 2 up has ``heads`` heads.

    The token before the start of a sequence, and any token at or before the latest ``boundary`` id that precedes the
    row, reads as ``boundary``.
    """

    module: int  # 0-based among the model's n-gram modules
    order: int
    heads: int
    vocabulary: int
    base: int
    seed: int
    boundary: int

    @property
    def all_heads(self) -> int:
        return (self.order - 1) * self.heads

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        """One odd int64 per token of the n-gram, newest first."""
        half = max(1, ((1 << 63) - 1) // max(self.vocabulary, 1) // 2)
        start = self.seed + _MODULE_STEP * self.module
        return tuple(2 * (_splitmix64((start + _GOLDEN * (i + 1)) & _MASK) % half) + 1 for i in range(self.order))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each head: consecutive primes from ``base``, continued from module to module."""
        return _primes_from(self.base, (self.module + 1) * self.all_heads)[self.module * self.all_heads :]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First table row of each head."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return tuple(starts[:-1])

    def table_rows(self, divisor: int) -> int:
        """Rows of the whole table, rounded up to ``divisor``."""
        return -(-sum(self.sizes) // divisor) * divisor

    @cached_property
    def _arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(multipliers, sizes and offsets as (order - 1) x heads)."""
        shape = (self.order - 1, self.heads)
        multipliers, sizes, offsets = (
            np.asarray(values, dtype=np.int64) for values in (self.multipliers, self.sizes, self.offsets)
        )
        return multipliers, sizes.reshape(shape), offsets.reshape(shape)

    def rows(self, window: list[int]) -> npt.NDArray[np.int64]:
        """Table rows T x all_heads of the tokens after the first ``order - 1`` of ``window``, which precede them."""
        before = self.order - 1
        if len(window) <= before + _FEW_ROWS:
            rows = [self._row(window, at) for at in range(before, len(window))]
            return np.array(rows, dtype=np.int64).reshape(-1, self.all_heads)
        multipliers, sizes, offsets = self._arrays
        tokens = np.asarray(window, dtype=np.int64)
        count = len(window) - before
        mixed = tokens[before:] * multipliers[0]
        inside = np.ones(count, dtype=bool)
        found = []
        for shift in range(1, self.order):
            earlier = tokens[before - shift : before - shift + count]
            inside = inside & (earlier != self.boundary)
            mixed = mixed ^ (np.where(inside, earlier, self.boundary) * multipliers[shift])
            found.append(np.remainder(mixed[:, None], sizes[shift - 1]) + offsets[shift - 1])
        return np.concatenate(found, axis=1)

    def _row(self, window: list[int], at: int) -> list[int]:
        """The rows of one token."""
        multipliers, sizes, offsets = self.multipliers, self.sizes, self.offsets
        mixed, inside, found, first = _wrapped(window[at] * multipliers[0]), True, [], 0
        for shift in range(1, self.order):
            inside = inside and window[at - shift] != self.boundary
            mixed ^= _wrapped((window[at - shift] if inside else self.boundary) * multipliers[shift])
            for head in range(first, first := first + self.heads):
                found.append(mixed % sizes[head] + offsets[head])
        return found


def _wrapped(value: int) -> int:
    """As an int64 holds it."""
    return ((value + (1 << 63)) & _MASK) - (1 << 63)
