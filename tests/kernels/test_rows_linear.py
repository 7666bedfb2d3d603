"""The native matrix product and embedding against float64, and the law of rows: T, level and threads change no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cpu import pool
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import Matrix
from tests.kernels.guard import Guarded
from tests.kernels.levels import on_every_level, same_bits
from tests.kernels.rows_mirror import q8_product

OPS: Any = Guarded(CpuOps())
FORMATS = ("f32", "bf16", "q8_0")


def make_matrix(rows: int, columns: int, kind: str, seed: int) -> tuple[Matrix, np.ndarray]:
    """A matrix and its weights in float64, from the definition of each format."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "f32":
        return Matrix("f32", torch.from_numpy(w), columns), w.astype(np.float64)
    if kind == "bf16":
        data = torch.from_numpy(w).to(torch.bfloat16)
        return Matrix("bf16", data, columns), data.double().numpy()
    blocks = -(-columns // 32)
    codes = rng.integers(-128, 128, (rows, blocks * 32)).astype(np.int8)
    codes[:, columns:] = 0
    scales = (rng.standard_normal((rows, blocks)) * 10.0 ** rng.integers(-7, 2, (rows, blocks))).astype(np.float16)
    exact = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    return Matrix("q8_0", torch.from_numpy(codes), columns, torch.from_numpy(scales)), exact[:, :columns]


def tolerance(x: np.ndarray, w: np.ndarray, kind: str) -> np.ndarray:
    """Bound of 16 lanes: each lane adds columns/16 products, then 4 more additions, half an ulp each; Q8_0 rounds each
    block of 32 of x to 2^-15 of its largest, half a unit each."""
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w).T
    bound = (x.shape[-1] / 16 + 6) * 2.0**-24 * magnitude + 1e-37
    if kind == "q8_0":
        blocks = np.pad(np.abs(x.astype(np.float64)), ((0, 0), (0, -x.shape[-1] % 32))).reshape(len(x), -1, 32)
        largest = np.repeat(blocks.max(-1), 32, -1)[:, : x.shape[-1]]
        bound += 2.0**-15 * largest @ np.abs(w).T
    return bound


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (5, 7), (9, 33), (17, 64), (24, 515), (13, 1100), (8, 1536)])
def test_linear_is_the_float64_product(kind: str, outputs: int, columns: int) -> None:
    matrix, w = make_matrix(outputs, columns, kind, columns)
    x = np.random.default_rng(1).standard_normal((7, columns)).astype(np.float32)
    y = on_every_level(lambda: OPS.linear(torch.from_numpy(x), matrix)).double().numpy()
    assert (np.abs(y - x.astype(np.float64) @ w.T) <= tolerance(x, w, kind)).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 40),
    st.sampled_from([1, 3, 15, 16, 17, 31, 32, 48, 100, 511, 512, 513, 544, 1041]),
    st.integers(0, 2**31),
)
def test_a_row_does_not_depend_on_the_others(kind: str, outputs: int, columns: int, seed: int) -> None:
    matrix, _ = make_matrix(outputs, columns, kind, seed)
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(seed))
    single = torch.cat([OPS.linear(x[t : t + 1], matrix) for t in range(9)])
    for rows in range(2, 10):
        assert same_bits(OPS.linear(x[:rows], matrix), single[:rows])
        assert same_bits(OPS.linear(x[9 - rows :], matrix), single[9 - rows :])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_prompt_gives_the_bits_of_single_rows(kind: str) -> None:
    """More rows than a lane buffer holds, more columns than a panel, with threads."""
    matrix, _ = make_matrix(75, 1040, kind, 3)
    x = torch.randn(203, 1040, generator=torch.Generator().manual_seed(3))
    single = torch.cat([OPS.linear(x[t : t + 1], matrix) for t in range(203)])
    assert same_bits(OPS.linear(x[:33].repeat(20, 1), matrix), single[:33].repeat(20, 1))  # two slabs of rows
    for threads in (1, 2, 3):
        pool.configure(threads)
        assert same_bits(OPS.linear(x, matrix), single)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_nan_stay_alone(kind: str) -> None:
    matrix, _ = make_matrix(19, 77, kind, 4)
    x = torch.randn(8, 77, generator=torch.Generator().manual_seed(4))
    clean = OPS.linear(x, matrix)
    x[2] = torch.nan
    x[5] = torch.inf
    y = on_every_level(lambda: torch.nan_to_num(OPS.linear(x, matrix), nan=1.0, posinf=2.0, neginf=3.0))
    others = [0, 1, 3, 4, 6, 7]
    assert same_bits(y[others], clean[others])
    assert (y[2] == 1.0).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_nothing_behind_a_row_is_read(kind: str, rows: int) -> None:
    """Rows cut out of a wider buffer whose rest is NaN: a masked read that reads too far shows."""
    columns = 45 if kind != "q8_0" else 64  # Q8_0 rows are stored whole
    matrix, w = make_matrix(11, columns, kind, 5)
    if kind != "q8_0":
        wide = torch.full((11, columns + 19), torch.nan, dtype=matrix.data.dtype)
        wide[:, :columns] = matrix.data
        matrix = Matrix(matrix.format, wide[:, :columns], columns)
    poisoned = torch.full((rows * columns + 64,), torch.nan)
    x = np.random.default_rng(5).standard_normal((rows, columns)).astype(np.float32)
    poisoned[: rows * columns] = torch.from_numpy(x).flatten()
    y = on_every_level(lambda: OPS.linear(poisoned[: rows * columns].view(rows, columns), matrix))
    assert (np.abs(y.double().numpy() - x.astype(np.float64) @ w.T) <= tolerance(x, w, kind)).all()


def q8_rows(rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows with blocks of every kind: Gaussian, one outlier, tiny, zero, at the edges of a power of two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x *= np.repeat(10.0 ** rng.integers(-6, 5, (rows, -(-columns // 32))), 32, -1)[:, :columns]
    x[:, ::37] *= 1000
    x[0, :32] = 0
    x[1, :32] = np.float32(2.0) - np.float32(2.0**-23)  # rounds up past the largest code
    x[2, :32] = -2.0
    x[3, :32] = np.float32(2.0**-113) * rng.standard_normal(min(32, columns))
    return x


@pytest.mark.parametrize("columns", [1, 32, 33, 64, 96, 100, 1024, 1025, 1056, 2080, 2560])
def test_q8_gives_the_bits_of_the_mirror(columns: int) -> None:
    matrix, _ = make_matrix(9, columns, "q8_0", 6)
    assert matrix.scales is not None
    matrix.data[0, :columns] = -128
    x = q8_rows(6, columns, 6)
    expected = q8_product(x, matrix.data.numpy(), matrix.scales.numpy())
    y = on_every_level(lambda: OPS.linear(torch.from_numpy(x), matrix))
    assert same_bits(y, torch.from_numpy(expected))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 140), st.integers(1, 13), st.integers(1, 40), st.integers(0, 2**31))
def test_q8_of_any_shape_gives_the_bits_of_the_mirror(columns: int, outputs: int, rows: int, seed: int) -> None:
    matrix, _ = make_matrix(outputs, columns, "q8_0", seed)
    assert matrix.scales is not None
    x = q8_rows(max(rows, 4), columns, seed)[:rows]
    expected = q8_product(x, matrix.data.numpy(), matrix.scales.numpy())
    assert same_bits(on_every_level(lambda: OPS.linear(torch.from_numpy(x), matrix)), torch.from_numpy(expected))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**96, -(2.0**127)])
def test_a_q8_row_beyond_its_range_is_nan(bad: float) -> None:
    matrix, _ = make_matrix(11, 64, "q8_0", 12)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(12))
    x[1, 40] = bad
    x[3, 40] = 2.0**95  # the largest exponent that counts
    y = on_every_level(lambda: torch.nan_to_num(OPS.linear(x, matrix), nan=3.0))
    assert (y[1] == 3.0).all()
    assert (y[[0, 2, 3, 4]] != 3.0).all()


@pytest.mark.parametrize(("kind", "most"), [("gaussian", 4e-5), ("student", 6e-5), ("outliers", 8e-5)])
def test_codes_of_sixteen_bits_cost_little(kind: str, most: float) -> None:
    """Relative L2 error of the product from the codes of x alone."""
    rng = np.random.default_rng(13)
    x = rng.standard_t(3, (16, 2048)) if kind == "student" else rng.standard_normal((16, 2048))
    x[:, ::100] *= 30 if kind == "outliers" else 1
    x = x.astype(np.float32)
    matrix, _ = make_matrix(256, 2048, "q8_0", 13)
    assert matrix.scales is not None
    matrix.scales.fill_(0.01)
    exact = x.astype(np.float64) @ (matrix.data.double().numpy() * float(matrix.scales[0, 0])).T
    error = OPS.linear(torch.from_numpy(x), matrix).double().numpy() - exact
    assert np.linalg.norm(error) / np.linalg.norm(exact) < most


def test_denormal_products_are_kept() -> None:
    matrix = Matrix("f32", torch.full((1, 16), 1e-20), 16)
    x = torch.zeros(1, 16)
    x[0, 3] = 1e-22
    torch.set_flush_denormal(True)
    try:
        y = on_every_level(lambda: OPS.linear(x, matrix))
    finally:
        torch.set_flush_denormal(False)
    assert y.item() == np.float32(np.float64(np.float32(1e-20)) * np.float64(np.float32(1e-22))) > 0


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("columns", [5, 32, 50, 96])
def test_embedding_is_the_rows_of_the_table(kind: str, columns: int) -> None:
    matrix, w = make_matrix(12, columns, kind, 7)
    ids = [3, 0, 11, 3]
    x = on_every_level(lambda: OPS.embedding(ids, matrix))
    assert (x.double().numpy() == w[ids]).all()


def test_an_id_behind_the_table_is_refused() -> None:
    matrix, _ = make_matrix(12, 32, "f32", 8)
    for bad in (-1, 12):
        with pytest.raises(EngineError, match=f"token id {bad}, the table has 12 rows"):
            OPS.embedding([0, bad], matrix)


def test_wrong_widths_and_types_are_refused() -> None:
    matrix, _ = make_matrix(4, 32, "f32", 9)
    with pytest.raises(EngineError, match="linear columns: 31 and 32"):
        OPS.linear(torch.zeros(1, 31), matrix)
    with pytest.raises(EngineError, match="float64"):
        OPS.linear(torch.zeros(1, 32, dtype=torch.float64), matrix)


def test_small_work_wakes_no_thread() -> None:
    pool.configure(2)
    matrix, _ = make_matrix(128, 256, "bf16", 10)
    x, w = torch.randn(2, 256), torch.ones(256)
    jobs = pool.statistics().jobs
    OPS.linear(x, matrix)
    OPS.rms_norm(x, w, 1e-6)
    OPS.silu_mul(x, x)
    OPS.router(x, 8, renormalise=True)
    OPS.attention(x.view(2, 4, 64), torch.zeros(40, 2, 64), torch.zeros(40, 2, 64), 38, 1.0)
    assert pool.statistics().jobs == jobs
    OPS.linear(torch.randn(64, 256), matrix)
    assert pool.statistics().jobs > jobs
