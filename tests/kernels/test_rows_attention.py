"""Native attention against a float64 softmax, and the law: T, chunks, splits, level and threads change no bit."""

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
from tests.kernels.guard import Guarded
from tests.kernels.levels import on_every_level, same_bits

OPS: Any = Guarded(CpuOps())


def make_cache(
    rows: int, heads: int, groups: int, width: int, start: int, kind: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v with NaN in the cache behind the last row."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(rows, heads, width, generator=generator)
    k, v = (torch.full((start + rows + 5, groups, width), torch.nan, dtype=kind) for _ in range(2))
    for cache in (k, v):
        cache[: start + rows] = torch.randn(start + rows, groups, width, generator=generator).to(kind)
    return q, k, v


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: list[list[int]], scale: float) -> np.ndarray:
    q64, k64, v64 = q.double().numpy(), k.double().numpy(), v.double().numpy()
    share = q.shape[1] // k.shape[1]
    o = np.empty_like(q64)
    for t, seen in enumerate(lists):
        for n in range(q.shape[1]):
            s = (k64[seen, n // share] @ q64[t, n]) * scale
            e = np.exp(s - s.max())
            o[t, n] = (e / e.sum()) @ v64[seen, n // share]
    return o


def causal(rows: int, start: int) -> list[list[int]]:
    return [list(range(start + t + 1)) for t in range(rows)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "start"),
    [
        (1, 1, 1, 8, 0),
        (3, 4, 2, 16, 0),
        (5, 6, 2, 33, 250),
        (2, 12, 1, 256, 511),
        (9, 8, 8, 20, 1020),
        (70, 4, 1, 64, 0),
        (1, 8, 2, 128, 2300),
        (3, 2, 1, 1, 300),
    ],
)
def test_attention_is_the_float64_softmax(
    kind: torch.dtype, rows: int, heads: int, groups: int, width: int, start: int
) -> None:
    q, k, v = make_cache(rows, heads, groups, width, start, kind, width)
    scale = width**-0.5
    o = on_every_level(lambda: OPS.attention(q, k, v, start, scale))
    np.testing.assert_allclose(o.double().numpy(), expected(q, k, v, causal(rows, start), scale), rtol=0, atol=3e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([8, 24, 96]),
    st.sampled_from([0, 1, 247, 255, 256, 1015, 1024, 1279]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_windows_of_any_size_give_the_same_bits(
    groups: int, share: int, width: int, start: int, bf16: bool, seed: int
) -> None:
    rows = 9
    q, k, v = make_cache(rows, groups * share, groups, width, start, torch.bfloat16 if bf16 else torch.float32, seed)
    single = torch.cat([OPS.attention(q[t : t + 1], k, v, start + t, 0.2) for t in range(rows)])
    for size in range(2, 10):
        windows = [OPS.attention(q[t : t + size], k, v, start + t, 0.2) for t in range(0, rows, size)]
        assert same_bits(torch.cat(windows), single)


def test_threads_and_their_way_to_split_give_the_same_bits() -> None:
    q, k, v = make_cache(4, 8, 2, 64, 4000, torch.bfloat16, 1)  # by runs of the list
    many, mk, mv = make_cache(130, 8, 2, 64, 1500, torch.bfloat16, 2)  # by rows
    results = []
    for threads in (1, 2, 3, 5):
        pool.configure(threads)
        results.append((OPS.attention(q, k, v, 4000, 0.1), OPS.attention(many, mk, mv, 1500, 0.1)))
    for few, long in results[1:]:
        assert same_bits(few, results[0][0])
        assert same_bits(long, results[0][1])
    single = torch.cat([OPS.attention(many[t : t + 1], mk, mv, 1500 + t, 0.1) for t in range(0, 130, 16)])
    assert same_bits(single, results[0][1][::16])


def test_a_row_of_nan_stays_alone() -> None:
    q, k, v = make_cache(6, 4, 2, 32, 500, torch.float32, 3)
    clean = OPS.attention(q, k, v, 500, 0.2)
    k[503] = torch.nan
    v[503] = torch.inf
    q[1] = torch.nan
    o = OPS.attention(q, k, v, 500, 0.2)
    assert same_bits(o[[0, 2]], clean[[0, 2]])
    assert o[1].isnan().all()
    assert o[3:].isnan().all()


def test_scores_far_apart_do_not_overflow() -> None:
    q = torch.full((1, 1, 16), 1e4)
    k = torch.zeros(600, 1, 16)
    k[100], k[590] = 1e4, -1e4
    v = torch.randn(600, 1, 16, generator=torch.Generator().manual_seed(0))
    o = on_every_level(lambda: OPS.attention(q, k, v, 599, 1.0))
    assert same_bits(o[0], v[100])


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = make_cache(2, 4, 2, 16, 10, torch.float32, 4)
    with pytest.raises(EngineError, match="18 positions are attended, the cache holds 17"):
        OPS.attention(q, k, v, 16, 1.0)
    with pytest.raises(EngineError, match="float16"):
        OPS.attention(q, k.half(), v.half(), 10, 1.0)
    with pytest.raises(EngineError, match="3 query heads on 2 key/value heads"):
        OPS.attention(q[:, :3], k, v, 10, 1.0)
    with pytest.raises(EngineError, match="attention heads of 257"):
        OPS.attention(torch.zeros(1, 1, 257), torch.zeros(1, 1, 257), torch.zeros(1, 1, 257), 0, 1.0)
