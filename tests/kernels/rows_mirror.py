"""An independent mirror of the Q8_0 dense product in numpy: integers, then FP32 in the defined order with true FMA.

Written from the definition (decision record 0071), not from the native code: weights are a plain matrix of integers.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.expert_mirror import F32, fma

PANEL = 1024


def code_row(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """codes int64 [blocks, 32] and units FP32 [blocks] of one FP32 row."""
    blocks = np.zeros((-(-len(x) // 32), 32), F32)
    blocks.reshape(-1)[: len(x)] = x
    codes, units = np.zeros(blocks.shape, np.int64), np.zeros(len(blocks), F32)
    for b, block in enumerate(blocks):
        largest = np.abs(block).max()  # NaN if any is
        if not largest < 2.0**96:
            units[b] = np.nan
            continue
        exponent = max(int(np.frexp(largest)[1]) - 1, -100) if largest > 0 else -100
        units[b] = 2.0 ** (exponent - 14)
        codes[b] = np.minimum(np.rint(block.astype(np.float64) / 2.0 ** (exponent - 14)), 32767)
    return codes, units


def coded(x: np.ndarray) -> np.ndarray:
    """Rows [T, I] as their codes say, FP32: exact, a code has 16 bits and its unit is a power of two."""
    rows = [(codes * units[:, None].astype(np.float64)).reshape(-1)[: x.shape[1]] for codes, units in map(code_row, x)]
    return np.stack(rows).astype(F32)


def q8_product(x: np.ndarray, weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """FP32 [T, O] of rows x [T, I] with int8 weights [O, I'] and FP16 scales [O, I' / 32]."""
    outputs = len(weights)
    sums = weights.astype(np.int64).reshape(outputs, -1, 2, 8, 2)  # block, half, lane, pair
    y = np.zeros((len(x), outputs), F32)
    with np.errstate(invalid="ignore", over="ignore"):
        for t, row in enumerate(x):
            codes, units = code_row(row)
            dots = (sums * codes.reshape(1, -1, 2, 8, 2)).sum((2, 4))  # [O, block, lane of 8]
            assert np.abs(dots).max(initial=0) <= 2**24
            factors = (scales.astype(F32) * units).astype(F32)
            for first in range(0, len(units), PANEL // 32):
                lanes = np.zeros((outputs, 2, 8), F32)
                for b in range(first, min(first + PANEL // 32, len(units))):
                    factor = np.broadcast_to(factors[:, b, None], (outputs, 8))
                    lanes[:, b % 2] = fma(dots[:, b].astype(F32), factor, lanes[:, b % 2])
                s = lanes[:, 0] + lanes[:, 1]
                s = s[:, :4] + s[:, 4:]
                s = s[:, :2] + s[:, 2:]
                y[t] = y[t] + (s[:, 0] + s[:, 1])
    return y
