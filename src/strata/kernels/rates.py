"""Measures the native kernels for a forecast: multiply-adds a second of experts, dense products and attention.

Lives in ``kernels`` because it drives them directly on made-up weights, larger together than the last cache. Rates for
one row are bound by memory, those for many by arithmetic; a forecast takes the value between. It must not know
models or tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count as count_from
from itertools import cycle, repeat

import numpy as np
import torch

from strata.kernels.bench import EXPERTS_PER_CALL, ExpertsInMemory, huge_pages, kernel_pass
from strata.kernels.cpu import pool
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import Matrix, MatrixFormat
from strata.quant import ExpertFormat, ExpertLayout
from strata.stats import steady_mean

__all__ = ["ByRows", "KernelRates", "measure_kernels"]

ByRows = Mapping[int, float]
EXPERT_ROWS = (1, 4, 16, 64)
LINEAR_ROWS = (1, 16, 256)
WORKING_SET = 192 << 20  # larger than the last cache; every pass of one row takes another part of it
# Passes are a few milliseconds and their mean counts, stalls left out: a round is a sum of many. In one go
# of 0.15 s a cell came out at half its rate when the system tidied memory meanwhile; hence several short looks.
SWEEPS, LEAST_PASSES, LOOK_S = 6, 2, 0.03
LONG_WORK = 4 << 20  # multiply-adds from which on a pass is no launch; shorter ones are looked at a fifth of the time
# Hidden and intermediate width of experts, outputs and inputs of products, heads, width and positions of attention:
# next to nothing (whose time is a launch, taken off the others), a toy's, which caches hold, and a real model's.
EXPERT_SIZES = ((64, 64), (256, 128), (1024, 512))
LINEAR_SIZES = ((64, 64), (256, 256), (2048, 2048))
ATTENTION_SIZES = ((2, 32, 64), (8, 32, 512), (16, 128, 512))
SHARED_OUTPUTS = 256  # of a product with many rows, for each thread: rows are cut into panels once for all of them
GROUP = 8  # query heads that share keys and values


@dataclass(frozen=True)
class KernelRates:
    """Multiply-adds a second beyond a launch, by the multiply-adds of a row and then by rows.

    ``experts[format][work][rows]``: of an expert with so many rows; ``linear`` of a product; ``attention[head
    width][rows]``: of keys and values.
    """

    experts: Mapping[str, Mapping[int, ByRows]]
    linear: Mapping[str, Mapping[int, ByRows]]
    attention: Mapping[int, ByRows]


def measure_kernels(format: ExpertFormat) -> KernelRates:
    """Rates with experts of one format; the pool must have been configured. Takes three times ``WORKING_SET`` bytes.

    All cells are looked at in turn, several times, so that a busy moment of the machine meets none of them alone.
    """
    q8_0, bf16 = (_linear_cells(name) for name in ("q8_0", "bf16"))
    experts, attention = _expert_cells(format), _attention_cells()
    cells = [*q8_0, *bf16, *experts, *attention]
    for _ in range(SWEEPS):
        for cell in cells:
            cell.look()
    linear = {"q8_0": _rates(q8_0), "bf16": _rates(bf16)}
    # A row of FP32 is bound by memory, at twice the bytes; many rows are bound by arithmetic, which is FP32 in both.
    linear["f32"] = {
        size: {rows: rate / 2 if rows == 1 else rate for rows, rate in rates.items()}
        for size, rates in linear["bf16"].items()
    }
    widths = {2 * heads * width * positions: width for heads, width, positions in ATTENTION_SIZES}
    return KernelRates(
        {format: _rates(experts)}, linear, {widths[size]: rates for size, rates in _rates(attention).items()}
    )


@dataclass
class _Cell:
    """A pass of ``work`` multiply-adds, of a kind of ``size`` a row; each pass is the next of ``turns``, which read
    ``memory``."""

    size: int
    rows: int
    work: int
    turns: Iterator[Callable[[], object]]
    memory: object = None
    seconds: list[float] = field(default_factory=list)

    def look(self) -> None:
        """A few passes more, the first uncounted: it finds the caches full of another cell's bytes."""
        next(self.turns)()
        end = time.perf_counter() + LOOK_S * min(1.0, 0.2 + self.work / LONG_WORK)
        for count in count_from(0):
            began = time.perf_counter()
            if count >= LEAST_PASSES and began > end:
                return
            next(self.turns)()
            self.seconds.append(time.perf_counter() - began)


def _rates(cells: list[_Cell]) -> dict[int, dict[int, float]]:
    """Multiply-adds a second by size and rows; the smallest size is the launch that the others are less."""
    smallest = min(cell.size for cell in cells)
    launches = {cell.rows: steady_mean(cell.seconds) for cell in cells if cell.size == smallest}
    found: dict[int, dict[int, float]] = {}
    for cell in cells:
        if cell.size != smallest:
            seconds = steady_mean(cell.seconds)
            found.setdefault(cell.size, {})[cell.rows] = cell.work / max(seconds - launches[cell.rows], seconds / 4)
    return found


def _expert_cells(format: ExpertFormat) -> list[_Cell]:
    cells = []
    for hidden, intermediate in EXPERT_SIZES:
        layout = ExpertLayout(hidden, intermediate, format)
        is_large = (hidden, intermediate) == EXPERT_SIZES[-1]
        experts = ExpertsInMemory(layout, huge_pages(WORKING_SET if is_large else EXPERTS_PER_CALL * layout.blob_bytes))
        work = 3 * hidden * intermediate
        for rows in EXPERT_ROWS:
            # A real model's row is bound by memory: every call takes other experts. More rows are bound by arithmetic:
            # the same again, and fewer experts the more rows, so that a pass stays short.
            calls = experts.calls(rows, None if is_large and rows == 1 else max(1, EXPERTS_PER_CALL // rows))
            turns = cycle([kernel_pass(experts, rows, [call]) for call in calls[:-1] or calls])
            cells.append(_Cell(work, rows, work * len(calls[0].tasks) * rows, turns, experts))
    return cells


def _linear_cells(format: MatrixFormat) -> list[_Cell]:
    ops, cells = CpuOps(), []
    for outputs, columns in LINEAR_SIZES:
        is_large = (outputs, columns) == LINEAR_SIZES[-1]
        bytes_each = outputs * columns * (1 if format == "q8_0" else 2)
        many = [_matrix(format, outputs, columns) for _ in range(WORKING_SET // bytes_each if is_large else 1)]
        few = _matrix(format, min(outputs, max(2, pool.threads()) * SHARED_OUTPUTS), columns)
        for rows in LINEAR_ROWS:
            used = many if rows == 1 else [few]
            x_TI = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
            turns = cycle([partial(ops.linear, x_TI, matrix) for matrix in used])
            cells.append(_Cell(outputs * columns, rows, used[0].rows * columns * rows, turns))
    return cells


def _matrix(format: MatrixFormat, rows: int, columns: int) -> Matrix:
    if format == "q8_0":
        codes = torch.full((rows, columns), 3, dtype=torch.int8)
        return Matrix("q8_0", codes, columns, torch.full((rows, columns // 32), 0.01, dtype=torch.float16))
    return Matrix(format, torch.full((rows, columns), 0.5, dtype=torch.bfloat16), columns)


def _attention_cells() -> list[_Cell]:
    ops, cells = CpuOps(), []
    for heads, width, positions in ATTENTION_SIZES:
        k_PGD = torch.randn(positions, max(1, heads // GROUP), width).to(torch.bfloat16)
        for rows in (1, 64):
            q_TND, start = torch.randn(rows, heads, width), positions - rows
            seen = int(np.arange(start, positions).sum()) + rows
            turns = repeat(partial(ops.attention, q_TND, k_PGD, k_PGD, start, width**-0.5))
            cells.append(_Cell(2 * heads * width * positions, rows, 2 * heads * width * seen, turns))
    return cells
