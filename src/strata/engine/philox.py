"""Random numbers that are a function of a seed and a position, and of nothing else.

A sampler with a hidden state gives other tokens when the batch, a cancelled neighbour or a rejected draft moves that
state. Here the number for step n of a request is computed from (seed, n) alone, on any device, in any order.
It must not know what the numbers are for.

Source: Philox-4x32 with ten rounds, J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011; checked against the vectors its authors published.
"""

from __future__ import annotations

import secrets

__all__ = ["fresh_seed", "philox_4x32", "uniform"]

_MASK = 0xFFFFFFFF
_MULTIPLY_0, _MULTIPLY_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over four counter words with two key words; all 32 bits, unsigned."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. ``seed`` counts modulo 2^64; ``position`` in [0, 2^64)."""
    word_0, word_1, _, _ = philox_4x32(
        (position & _MASK, position >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK)
    )
    return ((word_0 << 21) | (word_1 >> 11)) * 2.0**-53


def fresh_seed() -> int:
    """A seed for a request that named none: 63 bits from the operating system, so that it prints as a JSON number."""
    return secrets.randbits(63)
