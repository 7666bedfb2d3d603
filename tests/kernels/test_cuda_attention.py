"""Recorded attention, block selection and block keys against the reference; the position is read when they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.reference import ReferenceOps
from tests.kernels.cuda_runs import Run, equal, noise, random_matrix, run, same_rows

REFERENCE = ReferenceOps()


def cache(positions: int, heads: int, width: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, ...]:
    keys, values = (noise(positions, heads, width, seed=seed + i).to(dtype) for i in range(2))
    return keys, values


@settings(max_examples=12)
@given(
    rows=st.integers(1, 8),
    start=st.sampled_from([0, 1, 62, 63, 64, 200, 255, 256, 600]),
    group=st.sampled_from([(1, 1), (2, 3), (2, 6), (1, 4)]),
    width=st.sampled_from([8, 20, 64, 72, 130, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_dense(rows: int, start: int, group: tuple[int, int], width: int, dtype: torch.dtype) -> None:
    kv_heads, per_head = group
    q, (k, v) = noise(rows, kv_heads * per_head, width), cache(700, kv_heads, width, dtype)
    k[start + rows :] = torch.nan  # rows that nobody has written
    found = run(lambda ops: ops.attention(q, k, v, 0, width**-0.5), position=start)
    expected = REFERENCE.attention(q, k, v, start, width**-0.5)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("width", [16, 30, 128, 256])
def test_rows_of_dense_attention(width: int) -> None:
    q, (k, v) = noise(8, 4, width), cache(300, 2, width, torch.bfloat16)
    same_rows(lambda ops, r: ops.attention(q[r], k, v, 0, 0.3), 8, position=251)


@pytest.mark.parametrize("apart_first", [False, True])
def test_a_gate_is_applied_where_the_rows_are_made(apart_first: bool) -> None:
    """With the bits of a gated product of rows that were read by something else first."""
    q, (k, v), gate = noise(5, 4, 64), cache(300, 2, 64, torch.bfloat16), noise(5, 4, 2, 64)
    matrix = random_matrix(9, 256, "q8_0")

    def record(ops: CudaOps, r: slice = slice(0, 5)) -> torch.Tensor:
        attended = ops.attention(q[r], k, v, 0, 0.3)
        if apart_first:
            ops.settle()
        return ops.gated_linear(gate[r][:, :, 1], attended, matrix, "sigmoid")

    found = run(record, position=251)
    attended = run(lambda ops: ops.attention(q, k, v, 0, 0.3), position=251)
    assert equal(found, run(lambda ops: ops.gated_linear(gate[:, :, 1], attended, matrix, "sigmoid")))
    same_rows(record, 5, position=251)


def test_one_program_serves_every_position() -> None:
    q, (k, v), one = noise(3, 2, 32), cache(600, 1, 32, torch.float32), Run.new()
    found = one.ops.attention(q, k, v, 123, 0.5)
    launches = one.prepare()
    for start in (0, 597, 254, 300):
        one.set(position=start)
        launches.run()
        one.machine.synchronize()
        torch.testing.assert_close(found, REFERENCE.attention(q, k, v, start, 0.5), rtol=2e-5, atol=2e-6)
    one.program.check_guards()


def lists(rows: int, start: int, block: int, top: int, seed: int = 0) -> torch.Tensor:
    """Random blocks that each row may list, ascending, padded."""
    random, found = torch.Generator().manual_seed(seed), torch.full((rows, top), -1, dtype=torch.int32)
    for t in range(rows):
        complete = (start + t + 1) // block
        picks = torch.randperm(complete, generator=random)[:top].sort().values
        found[t, : len(picks)] = picks.int()
    return found


@settings(max_examples=12)
@given(
    rows=st.integers(1, 8), start=st.sampled_from([0, 2, 3, 90, 500]), block=st.sampled_from([4, 5]),
    top=st.sampled_from([1, 7, 80]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_sparse(rows: int, start: int, block: int, top: int, dtype: torch.dtype) -> None:
    q, (k, v), listed = noise(rows, 4, 24), cache(520, 2, 24, dtype), lists(rows, start, block, top)
    found = run(lambda ops: ops.sparse_attention(q, k, v, 0, 0.2, listed, block), position=start)
    expected = REFERENCE.sparse_attention(q, k, v, start, 0.2, listed, block)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_rows_of_sparse_attention() -> None:
    q, (k, v), listed = noise(8, 6, 64), cache(520, 2, 64, torch.bfloat16), lists(8, 500, 4, 90)
    same_rows(lambda ops, r: ops.sparse_attention(q[r], k, v, 0, 0.2, listed[r], 4), 8, position=500)


@pytest.mark.parametrize("start", [5, 255, 700])
def test_a_list_of_everything_is_dense_attention(start: int) -> None:
    q, (k, v) = noise(5, 6, 32), cache(720, 2, 32, torch.float32)
    dense, unlisted, listed = run(
        lambda ops: (
            ops.attention(q, k, v, 0, 0.2),
            ops.sparse_attention(q, k, v, 0, 0.2, None, 4),
            ops.sparse_attention(q, k, v, 0, 0.2, lists(5, start, 4, 200), 4),
        ),
        position=start,
    )
    assert equal(dense, unlisted)
    assert equal(dense, listed)


def test_lists_as_they_are_selected_and_as_they_are_given_are_the_same_bits() -> None:
    """A list that ``select_blocks`` has just made is known to be full; another one is counted."""
    q, (k, v), index_q, keys = noise(3, 4, 32), cache(520, 2, 32, torch.bfloat16), noise(3, 2, 16), noise(130, 16)

    def record(ops: CudaOps) -> list[torch.Tensor]:
        ids = ops.select_blocks(index_q, keys, 0, 4, 40)
        selected = ops.sparse_attention(q, k, v, 0, 0.2, ids, 4)
        ops._selected.clear()
        return [selected, ops.sparse_attention(q, k, v, 0, 0.2, ids, 4)]

    for position in (0, 2, 150, 157, 500):
        assert equal(*run(record, position=position)), position


def test_many_cuts_are_joined() -> None:
    """More cuts than a slice has under way at once."""
    q, (k, v) = noise(1, 2, 8), cache(9000, 1, 8, torch.bfloat16)
    found = run(lambda ops: ops.attention(q, k, v, 0, 0.4), position=8998)
    torch.testing.assert_close(found, REFERENCE.attention(q, k, v, 8998, 0.4), rtol=2e-5, atol=2e-6)


def test_a_nan_stays_in_its_row_and_head() -> None:
    q, (k, v) = noise(2, 4, 16), cache(40, 2, 16, torch.float32)
    q[0, 1, 3] = torch.nan
    found = run(lambda ops: ops.attention(q, k, v, 0, 0.25), position=30)
    assert found[0, 1].isnan().all()
    found[0, 1] = 0.0
    assert not found.isnan().any()


def test_what_is_not_held_is_refused() -> None:
    q, (k, v) = noise(1, 1, 300), cache(4, 1, 300, torch.float32)
    with pytest.raises(EngineError, match="heads of 300 columns"):
        run(lambda ops: ops.attention(q, k, v, 0, 1.0))
    with pytest.raises(EngineError, match=r"a cache of torch\.float16"):
        run(lambda ops: ops.attention(q, k.half(), v.half(), 0, 1.0))


@settings(max_examples=15)
@given(blocks=st.integers(1, 5), members=st.integers(1, 6), width=st.sampled_from([8, 33, 128]))
def test_block_keys(blocks: int, members: int, width: int) -> None:
    raw, weight, angle = noise(blocks, members, width), noise(width), noise(blocks, width // 4)
    arguments: tuple[Any, ...] = (raw, weight, 1e-6, angle.cos(), angle.sin())
    found = run(lambda ops: ops.index_block_keys(*arguments))
    torch.testing.assert_close(found, REFERENCE.index_block_keys(*arguments), rtol=3e-6, atol=2e-6)


def integers(*shape: int, seed: int = 0, largest: int = 3) -> torch.Tensor:
    """Small integers as floats: their dot products are exact in any order, and ties are common."""
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-largest, largest + 1, shape, generator=random).float()


@settings(max_examples=20)
@given(
    rows=st.integers(1, 8), start=st.sampled_from([0, 3, 41, 900, 4090, 9000]), top=st.sampled_from([1, 2, 33, 700]),
    heads=st.integers(1, 3), largest=st.sampled_from([0, 1, 20]),
)  # fmt: skip
def test_selection(rows: int, start: int, top: int, heads: int, largest: int) -> None:
    """The selected blocks are those of the reference, ties included; with ``largest`` 0 all scores are zero."""
    q, keys = integers(rows, heads, 16, largest=largest), integers(9100 // 4, 16, seed=3)
    found = run(lambda ops: ops.select_blocks(q, keys, 0, 4, top), position=start)
    assert torch.equal(found, REFERENCE.select_blocks(q, keys, start, 4, top))


def test_selection_of_special_scores() -> None:
    q, keys = integers(6, 1, 8), integers(500, 8, seed=2)
    keys[10] = torch.nan
    keys[20], q[2] = torch.inf, 1.0
    q[4] = torch.nan
    keys[30] = 0.0
    found = run(lambda ops: ops.select_blocks(q, keys, 0, 4, 60), position=1990)
    assert torch.equal(found, REFERENCE.select_blocks(q, keys, 1990, 4, 60))
    assert 10 not in found[0]
    assert 20 in found[2]
    assert found[4].tolist() == list(range(60)), "a row of NaN lists the lowest ids"
    same_rows(lambda ops, r: ops.select_blocks(q[r], keys, 0, 4, 60), 6, position=1990)


def test_selection_of_random_scores() -> None:
    q, keys = noise(3, 4, 128), noise(700, 128)
    same_rows(lambda ops, r: ops.select_blocks(q[r], keys, 0, 4, 64), 3, position=2780)
    found = run(lambda ops: ops.select_blocks(q, keys, 0, 4, 64), position=2780)
    expected = REFERENCE.select_blocks(q, keys, 2780, 4, 64)
    differing = sum(len(set(a) ^ set(b)) for a, b in zip(found.tolist(), expected.tolist(), strict=True))
    assert differing <= 2, "only scores that round to neighbours may change places"
