"""The native block index and sparse attention against plain Python and float64, ties and NaN included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.ops import CpuOps
from tests.kernels.guard import Guarded
from tests.kernels.levels import on_every_level, same_bits

OPS: Any = Guarded(CpuOps())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(y: torch.Tensor, exact: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=0, atol=atol)


def best_blocks(scores: np.ndarray, top: int) -> list[int]:
    """By (score descending, id ascending), NaN last; returned ascending."""
    order = sorted(
        range(len(scores)), key=lambda b: (bool(np.isnan(scores[b])), -scores[b] if scores[b] == scores[b] else 0.0, b)
    )
    return sorted(order[:top])


@pytest.mark.parametrize(
    ("blocks", "members", "width", "half"), [(1, 4, 16, 4), (7, 4, 33, 8), (3, 2, 128, 64), (5, 1, 8, 2)]
)
def test_index_block_keys(blocks: int, members: int, width: int, half: int) -> None:
    raw, weight = random(blocks, members, width), random(width, seed=1)
    angle = 50 * random(blocks, half, seed=2)
    cos, sin = angle.cos(), angle.sin()
    (key,) = on_every_level(lambda: [OPS.index_block_keys(raw, weight, 1e-6, cos, sin)])
    mean = raw.double().numpy().mean(1)
    x = mean / np.sqrt((mean**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight.double().numpy())
    c, s = cos.double().numpy(), sin.double().numpy()
    a, b = x[:, :half], x[:, half : 2 * half]
    close(key, np.concatenate([a * c - b * s, b * c + a * s, x[:, 2 * half :]], 1), 5e-6)
    one = [OPS.index_block_keys(raw[i : i + 1], weight, 1e-6, cos[i : i + 1], sin[i : i + 1]) for i in range(blocks)]
    assert same_bits(torch.cat(one), key)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9),
    heads=st.sampled_from([1, 3, 4]),
    start=st.integers(0, 1500),
    block=st.sampled_from([1, 3, 4]),
    top=st.integers(1, 200),
    coarse=st.sampled_from([1, 2, 50]),
    seed=st.integers(0, 2**31),
)
def test_select_blocks(rows: int, heads: int, start: int, block: int, top: int, coarse: int, seed: int) -> None:
    """Small integers: scores are exact in any order, and ties and zeros are common."""
    rng = np.random.default_rng(seed)
    total = (start + rows) // block
    q = rng.integers(-coarse, coarse + 1, (rows, heads, 8)).astype(np.float32)
    key = np.full((total + 3, 8), np.nan, np.float32)
    key[:total] = rng.integers(-coarse, coarse + 1, (total, 8))
    if total > 5:
        key[rng.integers(0, total, 2)] = np.nan
    found = OPS.select_blocks(torch.from_numpy(q), torch.from_numpy(key), start, block, top)
    assert found.shape == (rows, top)
    assert found.dtype == torch.int32
    for t in range(rows):
        seen = (start + t + 1) // block
        scores = np.zeros(seen)
        for n in range(heads):
            product = key[:seen] @ q[t, n]
            scores += np.where(product > 0, product, np.where(np.isnan(product), np.nan, 0.0))
        picked = best_blocks(scores, top)
        assert found[t].tolist() == picked + [-1] * (top - len(picked))


def test_select_blocks_of_real_scores_in_any_window_level_and_thread() -> None:
    q, key = random(60, 4, 40), random(900, 40, seed=3)
    first = OPS.select_blocks(q, key, 3500, 4, 64)
    score = np.maximum(np.einsum("tnd,bd->tnb", q.double().numpy(), key.double().numpy()), 0).sum(1)
    for t in range(60):
        seen = (3500 + t + 1) // 4
        chosen = np.zeros(seen, bool)
        chosen[first[t].numpy()] = True
        assert score[t, :seen][chosen].min() >= score[t, :seen][~chosen].max() - 1e-4
    for level in library.available_isa_levels():
        library.select_isa(level)
        for threads in (1, 3):
            pool.configure(threads)
            for size in (1, 7, 60):
                parts = [OPS.select_blocks(q[t : t + size], key, 3500 + t, 4, 64) for t in range(0, 60, size)]
                assert torch.equal(torch.cat(parts), first)


def make_cache(rows: int, heads: int, groups: int, width: int, start: int, kind: torch.dtype) -> list[torch.Tensor]:
    k, v = (torch.full((start + rows + 2, groups, width), torch.nan, dtype=kind) for _ in range(2))
    k[: start + rows] = random(start + rows, groups, width, seed=5).to(kind)
    v[: start + rows] = random(start + rows, groups, width, seed=6).to(kind)
    return [2 * random(rows, heads, width, seed=4), k, v]


def random_lists(rows: int, start: int, block: int, top: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    lists = np.full((rows, top), -1, np.int32)
    for t in range(rows):
        seen = (start + t + 1) // block
        size = min(seen, top)
        lists[t, :size] = np.sort(rng.choice(seen, size, replace=False)) if size else []
    return torch.from_numpy(lists)


def positions(lists: torch.Tensor, t: int, start: int, block: int) -> list[int]:
    end = start + t + 1
    listed = [b * block + j for b in lists[t].tolist() if b >= 0 for j in range(block)]
    return listed + list(range(end // block * block, end))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "start", "block", "top"),
    [
        (5, 4, 2, 32, 100, 4, 9),
        (9, 6, 1, 20, 1500, 4, 300),
        (3, 2, 2, 64, 6, 4, 5),
        (4, 3, 3, 16, 700, 3, 1),
        (2, 24, 2, 256, 600, 4, 70),
    ],
)
def test_sparse_attention(
    kind: torch.dtype, rows: int, heads: int, groups: int, width: int, start: int, block: int, top: int
) -> None:
    q, k, v = make_cache(rows, heads, groups, width, start, kind)
    lists = random_lists(rows, start, block, top, seed=7)
    (o,) = on_every_level(lambda: [OPS.sparse_attention(q, k, v, start, 0.2, lists, block)])
    share = heads // groups
    exact = np.empty(q.shape)
    for t in range(rows):
        seen = positions(lists, t, start, block)
        for n in range(heads):
            s = 0.2 * (k[seen, n // share].double().numpy() @ q[t, n].double().numpy())
            e = np.exp(s - s.max())
            exact[t, n] = (e / e.sum()) @ v[seen, n // share].double().numpy()
    close(o, exact, 5e-6)
    for size in (1, 2, 3):
        parts = [
            OPS.sparse_attention(q[t : t + size], k, v, start + t, 0.2, lists[t : t + size], block)
            for t in range(0, rows, size)
        ]
        assert same_bits(torch.cat(parts), o)
    for threads in (2, 3):
        pool.configure(threads)
        assert same_bits(OPS.sparse_attention(q, k, v, start, 0.2, lists, block), o)


@pytest.mark.parametrize("top", [300, 500])
def test_lists_of_everything_are_dense_attention(top: int) -> None:
    """From row 40 on, 300 blocks no longer hold everything: the rows before are the bits of dense attention."""
    q, k, v = make_cache(60, 8, 2, 32, 1160, torch.bfloat16)
    lists = random_lists(60, 1160, 4, top, seed=8)
    dense = OPS.attention(q, k, v, 1160, 0.2)
    o = OPS.sparse_attention(q, k, v, 1160, 0.2, lists, 4)
    whole = [t for t in range(60) if (1160 + t + 1) // 4 <= top]
    assert whole
    assert same_bits(o[whole], dense[whole])
    assert same_bits(OPS.sparse_attention(q, k, v, 1160, 0.2, None, 4), dense)
    for t in whole[::9]:  # a row alone, by the way of lists
        hidden = torch.cat([lists[t : t + 1], lists[-1:]])
        hidden[1] = -1
        pair = OPS.sparse_attention(q[t : t + 2], k, v, 1160 + t, 0.2, hidden, 4)
        assert same_bits(pair[0], dense[t])


def test_a_bad_list_is_refused() -> None:
    q, k, v = make_cache(1, 2, 1, 16, 30, torch.float32)
    for bad in ([3, 3], [2, 1], [0, 7]):
        with pytest.raises(EngineError, match="row 0 lists block"):
            OPS.sparse_attention(q, k, v, 30, 1.0, torch.tensor([bad], dtype=torch.int32), 4)
    with pytest.raises(EngineError, match="int64"):
        OPS.sparse_attention(q, k, v, 30, 1.0, torch.tensor([[0]]), 4)
    with pytest.raises(EngineError, match="7 block keys of 16 are scored"):
        OPS.select_blocks(q, random(6, 16), 30, 4, 2)


def test_a_long_chunk_gives_the_bits_of_its_windows() -> None:
    q, k, v = make_cache(600, 2, 1, 8, 40, torch.float32)
    keys = random(160, 8, seed=9)
    lists = OPS.select_blocks(q, keys, 40, 4, 20)
    o = OPS.sparse_attention(q, k, v, 40, 0.3, lists, 4)
    for t in (0, 38, 47, 300, 593):
        few = slice(t, t + 7)
        assert torch.equal(OPS.select_blocks(q[few], keys, 40 + t, 4, 20), lists[few])
        assert same_bits(OPS.sparse_attention(q[few], k, v, 40 + t, 0.3, lists[few], 4), o[few])
