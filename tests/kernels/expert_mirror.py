"""An independent mirror of the exact expert arithmetic in numpy: integers, FP32 in the defined order, true FMA.

Written from the definition (decision record 0010), not from the native code: weights come as quantised matrices in
row order, so neither the blob's layout nor any SIMD order enters. A fused multiply-add is made from float64: the
product of two FP32 numbers is exact there, the sum is rounded to odd, and rounding that to FP32 is the one rounding
of the exact value (53 >= 2 * 24 + 2 bits).
"""

from __future__ import annotations

import numpy as np
import torch

from strata.quant.blocks import QuantisedMatrix

F32 = np.float32


def every_scale_with_every_pair_of_codes() -> tuple[QuantisedMatrix, QuantisedMatrix, QuantisedMatrix]:
    """Gate, up and down of one NVFP4 expert, 1,024 x 64: 4,064 blocks hold each of 256 bytes under each of 127 scales,
    in all three matrices; like scales share a row."""
    blocks = torch.arange(4096)
    codes = ((blocks[:, None] % 32) * 8 + torch.arange(8)).to(torch.uint8)
    scales = (blocks // 32).clamp_max(126).to(torch.uint8)
    ones = torch.ones(1)
    return (
        QuantisedMatrix("nvfp4", 1024, codes.view(1, 64, 512), scales.view(1, 64, 64), ones * 2.0**-4),
        QuantisedMatrix("nvfp4", 1024, codes.view(1, 64, 512), scales.flip(0).view(1, 64, 64), ones * 2.0**-3),
        QuantisedMatrix("nvfp4", 64, codes.view(1, 1024, 32), scales.view(1, 1024, 4), ones * 0.3),
    )


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    # Two-sum: the exact error of the addition.
    with np.errstate(invalid="ignore"):
        back = total - product
        error = (product - (total - back)) + (addend - back)
    bits = np.atleast_1d(total).view(np.int64).reshape(np.shape(total))
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    even = (bits & 1) == 0
    towards_zero = (error > 0) != (total > 0)
    # Round to odd: the truncated value with its last bit set when anything was lost.
    truncated = np.where(inexact & towards_zero, bits - 1, bits)
    odd = np.where(inexact & (towards_zero | even), truncated | 1, bits)
    with np.errstate(over="ignore"):
        return np.where(inexact, odd, bits).view(np.float64).astype(F32)


def f(x: object) -> np.ndarray:
    return np.asarray(x, dtype=F32)


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes int64 [T, K64], scales [T, K64/16], finite [T] of FP32 rows, padded to 64."""
    rows, width = x.shape
    padded = np.zeros((rows, -(-width // 64) * 64), F32)
    padded[:, :width] = x
    groups = padded.reshape(rows, -1, 16)
    finite = np.isfinite(groups).all(-1)
    largest = np.where(finite, np.abs(groups).max(-1), 0).astype(F32)
    counts = largest >= F32(2.0**-100)
    safe = np.where(counts, largest, F32(1))
    inverse = np.where(counts, F32(127) / safe, F32(0))
    scales = np.where(counts, safe / F32(127), F32(0))
    clean = np.where(finite[..., None], groups, F32(0))
    codes = np.rint(clean * inverse[..., None]).astype(np.int64)
    assert np.abs(codes).max(initial=0) <= 127
    return codes.reshape(rows, -1), scales, finite.all(-1)


def silu(x: np.ndarray) -> np.ndarray:
    z = np.clip(-x, F32(-87), F32(88))
    shift = F32(1.5 * 2**23)
    shifted = fma(z, f(1.4426950408889634), shift)
    n = shifted - shift
    r = fma(n, f(-float.fromhex("0x1.62e4p-1")), z)
    r = fma(n, f(-float.fromhex("0x1.7f7d1cp-20")), r)
    p = np.full_like(r, F32(1 / 5040))
    for constant in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = fma(p, r, np.full_like(r, F32(constant)))
    power = np.ldexp(F32(1), np.where(np.isfinite(n), n, 0).astype(np.int32)).astype(F32)
    return x / (F32(1) + p * power)


def matrix_product(matrix: QuantisedMatrix, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T, R] products of FP32 rows x with one matrix (no expert axis), and whether each row was finite."""
    columns = -(-matrix.columns // 64) * 64
    unit = F32(matrix.tensor_scale.item())
    if matrix.format == "bf16":
        return _bf16_product(matrix, x, columns) * unit, np.isfinite(x).all(-1)
    codes, scales, finite = quantise_rows(x)
    weights = np.zeros((matrix.rows, columns), np.int64)
    weights[:, : matrix.columns] = integer_codes(matrix)
    block_scales = np.zeros((matrix.rows, columns // 16), F32)
    if matrix.format == "nvfp4":
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
        block_scales[:, : matrix.scales.shape[-1]] = values[matrix.scales.numpy()] * F32(2.0**-8)
        unit = unit * F32(128)
    else:
        spread = np.repeat(matrix.scales.float().numpy(), 2, -1)
        block_scales[:, : spread.shape[-1]] = spread
    dots = np.einsum("rbi,tbi->trb", weights.reshape(matrix.rows, -1, 16), codes.reshape(len(x), -1, 16))
    factors = block_scales[None] * scales[:, None]
    return _segments(f(dots), factors, 8) * unit, finite


def integer_codes(matrix: QuantisedMatrix) -> np.ndarray:
    """Integer weights [R, columns]: twice the E2M1 value, or the 8-bit code."""
    if matrix.format == "q8_0":
        return matrix.codes.numpy().astype(np.int64)
    doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    packed = matrix.codes.numpy()
    return doubled[np.stack((packed & 15, packed >> 4), -1)].reshape(matrix.rows, -1)[:, : matrix.columns]


def _bf16_product(matrix: QuantisedMatrix, x: np.ndarray, columns: int) -> np.ndarray:
    weights, rows = np.zeros((matrix.rows, columns), F32), np.zeros((len(x), columns), F32)
    weights[:, : matrix.columns], rows[:, : x.shape[1]] = matrix.codes.float().numpy(), x
    shape = (len(x), matrix.rows, columns)
    return _segments(np.broadcast_to(weights[None], shape), np.broadcast_to(rows[:, None], shape), 128)


def _segments(a: np.ndarray, b: np.ndarray, length: int) -> np.ndarray:
    """Sum over the last axis of a * b: FMA from zero within segments of ``length``, segments added in order."""
    total = np.zeros(a.shape[:-1], F32)
    for start in range(0, a.shape[-1], length):
        acc = np.zeros_like(total)
        for i in range(start, min(start + length, a.shape[-1])):
            acc = fma(a[..., i], b[..., i], acc)
        total = total + acc
    return total


def expert(
    gate: QuantisedMatrix, up: QuantisedMatrix, down: QuantisedMatrix, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(y [T, H], flags [T]) of one expert for FP32 rows x [T, H]."""
    with np.errstate(all="ignore"):
        gates, finite = matrix_product(gate, x)
        ups, _ = matrix_product(up, x)
        y, inner_finite = matrix_product(down, silu(gates) * ups)
    wrong = ~np.isfinite(y)
    return np.where(wrong, F32(0), y), ~(finite & inner_finite & ~wrong.any(-1))


def combine(parts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = np.zeros((parts.shape[0], parts.shape[2]), F32)
    for k in range(parts.shape[1]):
        total = fma(np.broadcast_to(weights[:, k, None], total.shape), parts[:, k], total)
    return total
