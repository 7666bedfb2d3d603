"""Every native row operation at every number of rows up to 600, on every instruction set (decision record 0110).

Rows alone are held against float64, and each number of rows must give their bits. Old contents of memory are NaN and
inputs end at forbidden memory. `make test` takes every number of dense products and the edges of all blocks of the
others, `make test-all` every number of all.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.cpu import library, pool
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import MatrixFormat
from tests.kernels import row_cases
from tests.kernels.guard import poisoned
from tests.kernels.levels import same_bits
from tests.kernels.row_cases import CASES, ROWS, Case, Tensors

REAL_WIDTHS = (511, 513, 640, 2048, 2560, 5120)
# Rows of a block of some kernel: tiles, few rows, experts' panels, coded and packed blocks, slabs.
BLOCKS = (4, 8, 32, 48, 64, 96, 192, 256, 288, 384, 480, 512, ROWS - 5)
EDGES = tuple(sorted({1, *(block + step for block in BLOCKS for step in (-1, 0, 1, 5))}))
# All remainders of 96 and of fewer rows, then those that a slab of 256 or 512 may leave.
COUNTS = tuple(sorted({*range(1, 102), *range(190, 199), *range(511, 519), *EDGES}))
EVERY = tuple(range(1, ROWS + 1))


def widest_level() -> str:
    return library.available_isa_levels()[-1]


def rows_alone(case: Case) -> Tensors:
    singles = [case.run(t, 1) for t in range(ROWS)]
    return [torch.cat(parts) for parts in zip(*singles, strict=True)]


def wrong_counts(case: Case, alone: Tensors, counts: Sequence[int]) -> list[int]:
    return [n for n in counts if not same_bits(case.run(0, n), [y[:n] for y in alone])]


def wrong_of_levels(case: Case, counts: dict[str, Sequence[int]]) -> dict[tuple[str, int], list[int]]:
    """By level and threads: half of the counts with one thread, half with three."""
    library.select_isa(widest_level())
    alone = rows_alone(case)
    case.assert_exact(alone)
    wrong = {}
    for level, wanted in counts.items():
        library.select_isa(level)
        for threads in (1, 3):
            pool.configure(threads)
            found = wrong_counts(case, alone, wanted[threads // 2 :: 2])
            if found:
                wrong[level, threads] = found
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_rests_of_every_block_give_each_row_its_bits(name: str) -> None:
    dense = name.startswith("linear")
    counts = dict.fromkeys(library.available_isa_levels(), EVERY if dense else EDGES)
    if not dense:
        counts[widest_level()] = COUNTS
    assert not wrong_of_levels(CASES[name](), counts)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_every_number_of_rows_gives_each_row_its_bits(name: str) -> None:
    """Each with one thread and with three."""
    twice = [n for n in EVERY for _ in (0, 1)]
    assert not wrong_of_levels(CASES[name](), dict.fromkeys(library.available_isa_levels(), twice))


@cache
def wide(kind: str, columns: int, outputs: int = 5) -> tuple[Case, Tensors]:
    with poisoned():
        case = row_cases.linear(kind, columns, outputs)
        library.select_isa(widest_level())
        alone = rows_alone(case)
    case.assert_exact(alone)
    return case, alone


@pytest.mark.parametrize("columns", REAL_WIDTHS)
@pytest.mark.parametrize("kind", row_cases.FORMATS)
def test_products_at_widths_of_models_leave_any_rest_of_a_block_right(kind: str, columns: int) -> None:
    """All remainders of 96 rows behind one whole block, and those of the slab behind 512."""
    case, alone = wide(kind, columns)
    for level in library.available_isa_levels():
        library.select_isa(level)
        assert not wrong_counts(case, alone, (*range(1, 7), *range(97, 193), *range(509, 519))), level


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("columns", REAL_WIDTHS)
@pytest.mark.parametrize("kind", row_cases.FORMATS)
def test_products_at_widths_of_models_at_every_number_of_rows(kind: str, columns: int) -> None:
    case, alone = wide(kind, columns)
    for level in library.available_isa_levels():
        library.select_isa(level)
        assert not wrong_counts(case, alone, EVERY), level


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(row_cases.FORMATS),
    columns=st.sampled_from(REAL_WIDTHS),
    outputs=st.integers(1, 80),
    first=st.integers(0, 40),
    whole=st.sampled_from((0, 32, 96, 192, 288, 384, 480, 512)),
    rest=st.integers(0, 95),
    threads=st.integers(1, 4),
    level=st.sampled_from(("scalar", "any")),
)
def test_tails_of_rows_and_of_outputs_together(
    kind: MatrixFormat, columns: int, outputs: int, first: int, whole: int, rest: int, threads: int, level: str
) -> None:
    case, alone = wide(kind, columns, 80)
    matrix, _ = row_cases.make_matrix(80, columns, kind, 1)
    scales = None if matrix.scales is None else matrix.scales[:outputs]
    few = row_cases.fixed(row_cases.Matrix(kind, matrix.data[:outputs], columns, scales))
    count = max(1, min(whole + rest, ROWS - first, 200 if level == "scalar" else ROWS))
    library.select_isa("scalar" if level == "scalar" else widest_level())
    pool.configure(threads)
    x = row_cases.fixed(case.inputs[0][first : first + count])
    y = row_cases.OPS.linear(x, few)
    assert same_bits(y, alone[0][first : first + count, :outputs].contiguous())


def test_every_operation_has_a_case() -> None:
    """An operation that is added to the row kernels is tried at every number of rows as well."""
    source = inspect.getsource(row_cases)
    native = [
        name for part in CpuOps.__mro__ if part.__module__.startswith("strata.kernels.cpu")
        for name in vars(part) if not name.startswith("_") and name != "name"
    ]  # fmt: skip
    assert len(native) > 15
    assert not [name for name in native if f"OPS.{name}(" not in source]
