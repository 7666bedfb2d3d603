"""Measures the native kernels for a forecast: multiply-adds a second of experts, dense products and attention.

Lives in ``kernels`` because it drives them directly on made-up weights, larger together than the last cache. Rates for
a few rows are bound by memory, those for many by arithmetic; a forecast takes the value between. It must not know
models or tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat

import numpy as np
import torch

from strata.kernels.bench import EXPERTS_PER_CALL, ExpertsInMemory, huge_pages, kernel_pass
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import Matrix, MatrixFormat
from strata.quant import ExpertFormat, ExpertLayout

__all__ = ["EXPERT_ROWS", "LINEAR_ROWS", "KernelRates", "measure_kernels"]

EXPERT_ROWS = (1, 4, 16, 64)
LINEAR_ROWS = (1, 16, 256)
WORKING_SET = 256 << 20  # larger than the last cache; every pass of one row takes another part of it
# Passes are a few milliseconds, so that on a busy machine some of them run undisturbed, and the best one counts.
PASSES, SECONDS = 2, 0.15
HIDDEN, INTERMEDIATE = 1024, 512
HEADS, GROUPS, WIDTH, POSITIONS = 16, 2, 128, 512


@dataclass(frozen=True)
class KernelRates:
    """Multiply-adds a second. ``experts[format][rows]``: with so many rows an expert; ``linear`` likewise, with so many
    rows a product; ``attention``: keys and values of one row over many positions, and of many rows."""

    experts: Mapping[str, Mapping[int, float]]
    linear: Mapping[str, Mapping[int, float]]
    attention_row: float
    attention_rows: float


def measure_kernels(format: ExpertFormat) -> KernelRates:
    """Rates with experts of one format; the pool must have been configured. Takes twice ``WORKING_SET`` bytes."""
    linear: dict[str, dict[int, float]] = {"q8_0": _measure_linear("q8_0"), "bf16": _measure_linear("bf16")}
    # A row of FP32 is bound by memory, at twice the bytes; many rows are bound by arithmetic, which is FP32 in both.
    linear["f32"] = {rows: rate / 2 if rows == 1 else rate for rows, rate in linear["bf16"].items()}
    return KernelRates({format: _measure_experts(format)}, linear, _measure_attention(1), _measure_attention(64))


def _best(turns: Iterator[Callable[[], object]]) -> float:
    """Seconds of the best pass; each pass is the next of ``turns``."""
    seconds: list[float] = []
    while len(seconds) < PASSES or sum(seconds) < SECONDS:
        work = next(turns)
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _measure_experts(format: ExpertFormat) -> dict[int, float]:
    layout = ExpertLayout(HIDDEN, INTERMEDIATE, format)
    experts = ExpertsInMemory(layout, huge_pages(WORKING_SET))
    found = {}
    for rows in EXPERT_ROWS:
        # One row is bound by memory: every call takes other experts. More are bound by arithmetic: the same again.
        calls = experts.calls(rows, None if rows == 1 else max(1, EXPERTS_PER_CALL // rows))
        turns = cycle(kernel_pass(experts, rows, [call]) for call in calls[:-1] or calls)
        count = len(calls[0].tasks)
        found[rows] = 3 * HIDDEN * INTERMEDIATE * count * rows / _best(turns)
    return found


def _measure_linear(format: MatrixFormat) -> dict[int, float]:
    ops, columns, outputs = CpuOps(), 2 * HIDDEN, 2048
    bytes_each = outputs * columns * (1 if format == "q8_0" else 2)
    many = [_matrix(format, outputs, columns) for _ in range(WORKING_SET // bytes_each)]
    few = _matrix(format, 128, columns)
    found = {}
    for rows in LINEAR_ROWS:
        x_TI = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
        turns = cycle(partial(ops.linear, x_TI, matrix) for matrix in (many if rows == 1 else [few]))
        found[rows] = (outputs if rows == 1 else 128) * columns * rows / _best(turns)
    return found


def _matrix(format: MatrixFormat, rows: int, columns: int) -> Matrix:
    if format == "q8_0":
        codes = torch.full((rows, columns), 3, dtype=torch.int8)
        return Matrix("q8_0", codes, columns, torch.full((rows, columns // 32), 0.01, dtype=torch.float16))
    return Matrix(format, torch.full((rows, columns), 0.5, dtype=torch.bfloat16), columns)


def _measure_attention(rows: int) -> float:
    q_TND = torch.randn(rows, HEADS, WIDTH, generator=torch.Generator().manual_seed(3))
    k_PGD = torch.randn(POSITIONS, GROUPS, WIDTH, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    ops = CpuOps()
    start = POSITIONS - rows
    seen = int(np.arange(start, POSITIONS).sum()) + rows
    work = partial(ops.attention, q_TND, k_PGD, k_PGD, start, WIDTH**-0.5)
    return 2 * HEADS * WIDTH * seen / _best(repeat(work))
