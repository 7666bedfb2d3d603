"""The expert kernels at every number of rows up to 600 and at widths of models, on every level (decision record 0110).

Rows alone are held against the mirror, and each number of rows must give their bits. Inputs, results and lists end at
forbidden memory; results and scratch are NaN before each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.cpu import library, pool
from strata.kernels.cpu.experts import ExpertKernel
from strata.quant import ExpertFormat, ExpertLayout
from tests.kernels import expert_mirror as mirror
from tests.kernels.guard import behind
from tests.kernels.test_every_row_count import COUNTS, EDGES, EVERY, REAL_WIDTHS, widest_level
from tests.kernels.test_experts import FORMATS, Packed, agree, make, only, rows_of

ROWS = 600
SHARED = "five experts, two of them a row"


def picks_of(name: str) -> np.ndarray:
    if name == "one expert":
        return only(ROWS)
    return np.stack([np.random.default_rng(t).permutation(5)[:2] for t in range(ROWS)]).astype(np.int32)


def alone(packed: Packed, x: torch.Tensor, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = [packed.compute(x[t : t + 1], ids[t : t + 1]) for t in range(len(x))]
    return np.concatenate([y for y, _ in rows]), np.concatenate([flags for _, flags in rows])


def wrong_of_levels(
    packed: Packed, x: torch.Tensor, ids: np.ndarray, expected: tuple[np.ndarray, np.ndarray], counts: Sequence[int]
) -> list[tuple[str, int]]:
    wrong = []
    for level in library.available_isa_levels():
        library.select_isa(level)
        for threads in (1, 3):
            pool.configure(threads)
            for n in counts[threads // 2 :: 2]:
                if not agree(packed.compute(x[:n], ids[:n]), (expected[0][:n], expected[1][:n])):
                    wrong.append((level, n))
    return wrong


def case(format: ExpertFormat, name: str) -> tuple[Packed, torch.Tensor, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Rows of which three are not finite, at either end of a block of 64 and elsewhere."""
    packed, x, ids = make(80, 40, format, experts=5), rows_of(ROWS, 80), picks_of(name)
    x[63, 5], x[64, 79], x[300, 0] = torch.nan, torch.inf, -torch.inf
    expected = packed.expected(x, ids)
    assert agree(alone(packed, x, ids), expected)
    return packed, x, ids, expected


@pytest.mark.parametrize("name", ["one expert", SHARED])
@pytest.mark.parametrize("format", FORMATS)
def test_rests_of_every_block_give_the_mirror_bits(format: ExpertFormat, name: str) -> None:
    assert not wrong_of_levels(*case(format, name), counts=COUNTS if name == "one expert" else EDGES)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["one expert", SHARED])
@pytest.mark.parametrize("format", FORMATS)
def test_every_number_of_rows_gives_the_mirror_bits(format: ExpertFormat, name: str) -> None:
    assert not wrong_of_levels(*case(format, name), counts=[n for n in EVERY for _ in (0, 1)])


@pytest.mark.parametrize("hidden", REAL_WIDTHS)
@pytest.mark.parametrize("format", FORMATS)
def test_experts_at_widths_of_models_leave_any_rest_right(format: ExpertFormat, hidden: int) -> None:
    """All remainders of 64 rows and of fewer behind a whole block, with a rest of inner columns."""
    packed, x, ids = make(hidden, 40, format), rows_of(130, hidden), only(130)
    library.select_isa(widest_level())
    expected = alone(packed, x, ids)
    assert agree((expected[0][:2], expected[1][:2]), packed.expected(x[:2], ids[:2]))
    for level in library.available_isa_levels():
        library.select_isa(level)
        counts = (*range(1, 7), *range(63, 131)) if level == widest_level() else (5, 63, 65, 69, 130)
        for n in counts:
            assert agree(packed.compute(x[:n], ids[:n]), (expected[0][:n], expected[1][:n])), (level, n)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    format=st.sampled_from(FORMATS),
    hidden=st.sampled_from((*REAL_WIDTHS, 100)),
    inner=st.integers(1, 200),
    rows=st.integers(1, 140),
    threads=st.integers(1, 4),
    level=st.sampled_from(("scalar", "any")),
)
def test_tails_of_rows_and_of_both_widths_together(
    format: ExpertFormat, hidden: int, inner: int, rows: int, threads: int, level: str
) -> None:
    packed, x = make(hidden, inner, format), rows_of(rows, hidden)
    library.select_isa(widest_level())
    expected = alone(packed, x, only(rows))
    library.select_isa("scalar" if level == "scalar" else widest_level())
    pool.configure(threads)
    count = min(rows, 70) if level == "scalar" else rows
    assert agree(packed.compute(x[:count], only(count)), (expected[0][:count], expected[1][:count]))
    one = np.random.default_rng(rows).integers(rows)
    assert agree((expected[0][one : one + 1], expected[1][one : one + 1]), packed.expected(x[one : one + 1], only(1)))


@pytest.mark.parametrize("width", [1, 63, 65, 200])
def test_combine_at_every_number_of_rows(width: int) -> None:
    kernel = ExpertKernel(ExpertLayout(width, 64, "nvfp4"))
    parts, weights = rows_of(3 * ROWS, width).view(ROWS, 3, width), rows_of(ROWS, 3, 9)
    expected = mirror.combine(parts.numpy(), weights.numpy()).view(np.int32)
    for level in library.available_isa_levels():
        library.select_isa(level)
        for n in COUNTS:
            found = kernel.combine(behind(parts[:n]), behind(weights[:n]))
            assert np.array_equal(found.numpy().view(np.int32), expected[:n]), (level, n)
