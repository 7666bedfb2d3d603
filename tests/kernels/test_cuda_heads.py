"""What an attention layer does with its rows in one launch: the same bits as one operation after the other."""

from __future__ import annotations

import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cuda.cache_rows import IndexRows, KeyValueRows
from strata.kernels.reference import ReferenceOps
from tests.kernels.cuda_runs import Run, equal, noise

REFERENCE = ReferenceOps()
WIDTH, HALF, BLOCK = 24, 5, 4


def angles(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    angle = noise(rows, HALF, seed=seed)
    return angle.cos(), angle.sin()


def caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(60, 2, WIDTH, dtype=dtype), torch.zeros(60, 2, WIDTH, dtype=dtype)


def names(one: Run) -> list[str]:
    return [launch.kernel for launch in one.program.launches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_go_to_their_caches(rows: int, dtype: torch.dtype) -> None:
    """Together with the norms in one launch, or after them: the same bits at the committed position, nothing else."""
    q, k, v, weight = noise(rows, 4, WIDTH), noise(rows, 2, WIDTH), noise(rows, 2, WIDTH, seed=1), noise(WIDTH)
    cos, sin = angles(rows)
    found = []
    for apart in (False, True):
        keys, values = caches(dtype)
        one = Run.new().set(position=17)
        normed_q, normed_k = one.ops.norm_rope([(q, weight), (k, weight)], 1e-6, cos, sin, plus_one=True)
        if apart:
            one.ops.settle()
        one.program.appended.append(KeyValueRows(normed_k, v, keys, values))
        one.ops.settle_rows()
        assert names(one) == ["heads.take_rows"] * (1 + apart)
        one.go()
        assert torch.equal(keys[17 : 17 + rows], normed_k.to(dtype))
        assert torch.equal(values[17 : 17 + rows], v.to(dtype))
        for cache in (keys, values):
            assert not cache[:17].any()
            assert not cache[17 + rows :].any()
        found.append((normed_q.clone(), normed_k.clone(), keys))
    assert all(equal(a.float(), b.float()) for a, b in zip(*found, strict=True))


def test_attention_reads_what_was_appended_before_it() -> None:
    q, k, v = noise(2, 4, WIDTH), noise(2, 2, WIDTH), noise(2, 2, WIDTH, seed=1)
    keys, values = (torch.randn(60, 2, WIDTH) for _ in range(2))
    one = Run.new().set(position=9)
    one.program.appended.append(KeyValueRows(k, v, keys, values))
    found = one.ops.attention(q, keys, values, 0, 0.3)
    assert names(one)[0] == "heads.take_rows"
    one.go()
    assert torch.equal(keys[9:11], k)
    torch.testing.assert_close(found, REFERENCE.attention(q, keys, values, 9, 0.3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("position", [0, 3, 6, 13])
def test_blocks_are_written_when_they_are_complete(rows: int, position: int) -> None:
    """Their keys are the bits of the operation on its own; raw keys are kept; the rest of the caches stays."""
    width = 40
    before, raw, weight = noise(60, width, seed=2), noise(rows, width), noise(width)
    raw_PD, key_BD = torch.zeros(60, width), torch.full((15, width), 7.0)
    raw_PD[:position] = before[:position]
    one = Run.new().set(position=position)
    candidates = (rows + BLOCK - 1) // BLOCK
    cos, sin = angles(60, seed=3)
    first = position // BLOCK
    at = torch.arange(first, first + candidates) * BLOCK
    stand_in = one.program.empty(candidates, BLOCK, width)
    one.program.indexed[stand_in.data_ptr()] = IndexRows(raw, raw_PD, key_BD)
    one.ops.index_block_keys(stand_in, weight, 1e-6, cos[at], sin[at])
    assert not one.program.indexed
    one.ops.settle()
    assert names(one) == ["heads.take_rows"]
    one.go()
    assert torch.equal(raw_PD[:position], before[:position])
    assert torch.equal(raw_PD[position : position + rows], raw)
    assert not raw_PD[position + rows :].any()
    complete = (position + rows) // BLOCK
    if complete > first:
        alone = Run.new()
        whole = raw_PD[first * BLOCK : complete * BLOCK].view(-1, BLOCK, width)
        places = torch.arange(first, complete) * BLOCK
        expected = alone.ops.index_block_keys(whole, weight, 1e-6, cos[places], sin[places])
        alone.go()
        assert equal(key_BD[first:complete], expected)
    assert bool((key_BD[:first] == 7.0).all())
    assert bool((key_BD[complete:] == 7.0).all())


def test_norms_of_the_same_rows_share_a_launch() -> None:
    x, y, weight = noise(3, 2, WIDTH), noise(3, 1, 2 * WIDTH), noise(2 * WIDTH)
    cos, sin = angles(3)
    one = Run.new()
    (first,) = one.ops.norm_rope([(x, weight[:WIDTH])], 1e-6, cos, sin, plus_one=True)
    (second,) = one.ops.norm_rope([(y, weight)], 1e-5, cos, sin, plus_one=False)
    one.ops.settle()
    assert names(one) == ["heads.take_rows"]
    one.go()
    for normed, heads, w, eps, plus_one in ((first, x, weight[:WIDTH], 1e-6, True), (second, y, weight, 1e-5, False)):
        expected = REFERENCE.rope(REFERENCE.rms_norm(heads, w, eps, plus_one=plus_one), cos, sin)
        torch.testing.assert_close(normed, expected, rtol=3e-6, atol=2e-6)
    one.ops.norm_rope([(x, weight[:WIDTH])], 1e-6, cos, sin, plus_one=True)
    one.ops.norm_rope([(x, weight[:WIDTH])], 1e-6, cos.clone(), sin, plus_one=True)
    one.ops.settle()
    assert names(one) == ["heads.take_rows"] * 2, "other angles, another launch"


def test_a_cache_of_other_heads_is_refused() -> None:
    one = Run.new()
    keys, values = caches(torch.float16)
    one.program.appended.append(KeyValueRows(noise(1, 2, WIDTH), noise(1, 2, WIDTH), keys, values))
    with pytest.raises(EngineError, match=r"a cache of torch\.float16"):
        one.ops.settle_rows()
    one.program.appended.append(KeyValueRows(noise(1, 3, WIDTH), noise(1, 3, WIDTH), keys.float(), values.float()))
    with pytest.raises(EngineError, match="heads of a cache"):
        one.ops.settle_rows()
