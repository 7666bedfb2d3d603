"""Recorded row-wise operations against the reference: norms, rope, gates, router, the largest logit, copies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.reference import ReferenceOps
from tests.kernels.cuda_runs import equal, noise, run, same_rows

REFERENCE = ReferenceOps()


@settings(max_examples=20)
@given(rows=st.integers(1, 8), heads=st.integers(1, 5), columns=st.integers(1, 70))
def test_narrow_norms(rows: int, heads: int, columns: int) -> None:
    x, weight = noise(rows, heads, columns), noise(columns)
    for plus_one in (False, True):
        found = run(lambda ops, plus_one=plus_one: ops.rms_norm(x, weight, 1e-6, plus_one=plus_one))
        torch.testing.assert_close(found, REFERENCE.rms_norm(x, weight, 1e-6, plus_one=plus_one), rtol=3e-6, atol=1e-6)


def test_wide_norms_and_their_rows() -> None:
    x, weight = noise(8, 1500), noise(1500)
    found = run(lambda ops: ops.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(found, REFERENCE.rms_norm(x, weight, 1e-6), rtol=3e-6, atol=1e-6)
    same_rows(lambda ops, rows: ops.rms_norm(x[rows], weight, 1e-6), 8)
    heads = noise(8, 3, 64)
    same_rows(lambda ops, rows: ops.rms_norm(heads[rows], weight[:64], 1e-6), 8)


@pytest.mark.parametrize("columns", [70, 1300])
def test_a_sum_is_done_in_the_norm_that_reads_it(columns: int) -> None:
    """One launch with the bits of two; the sum itself is there too."""
    x, y, weight = noise(5, columns), noise(5, columns, seed=1), noise(columns)

    def record(ops: CudaOps, r: slice = slice(0, 5), *, apart: bool = False) -> list[torch.Tensor]:
        total = ops.add(x[r], y[r])
        if apart:
            ops.settle()
        return [ops.rms_norm(total, weight, 1e-6), total]

    together, apart = run(record), run(lambda ops: record(ops, apart=True))
    assert all(equal(a, b) for a, b in zip(together, apart, strict=True))
    assert torch.equal(together[1], x + y)
    same_rows(record, 5)


@pytest.mark.parametrize(("width", "half"), [(16, 8), (16, 3), (9, 4)])
def test_rope(width: int, half: int) -> None:
    x, angle = noise(5, 3, width), noise(5, half)
    found = run(lambda ops: ops.rope(x, angle.cos(), angle.sin()))
    torch.testing.assert_close(found, REFERENCE.rope(x, angle.cos(), angle.sin()), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])
    same_rows(lambda ops, r: ops.rope(x[r], angle[r].cos(), angle[r].sin()), 5)
    with pytest.raises(EngineError, match="rope of"):
        run(lambda ops: ops.rope(x[..., :4].contiguous(), angle.cos(), angle.sin()))


@pytest.mark.parametrize("width", [12, 33, 256])
def test_norm_and_rope_of_heads_in_one_launch(width: int) -> None:
    """The same bits as the two operations one after the other, for views too."""
    wide, k, weights = noise(5, 3, 2, width), noise(5, 2, width), (noise(width), noise(width, seed=1))
    angle = noise(5, width // 4)
    cos, sin = angle.cos(), angle.sin()

    def together(ops: CudaOps, r: slice) -> list[torch.Tensor]:
        heads = [(wide[r][:, :, 0], weights[0]), (k[r], weights[1])]
        return ops.norm_rope(heads, 1e-6, cos[r], sin[r], plus_one=True)

    found = run(lambda ops: together(ops, slice(0, 5)))
    for x, weight, y in zip((wide[:, :, 0].contiguous(), k), weights, found, strict=True):
        apart = run(lambda ops, x=x, w=weight: ops.rope(ops.rms_norm(x, w, 1e-6, plus_one=True), cos, sin))
        assert equal(y, apart)
    same_rows(together, 5)
    with pytest.raises(EngineError, match="norm_rope of 5 parts"):
        run(lambda ops: ops.norm_rope([(k, weights[0])] * 5, 1e-6, cos, sin, plus_one=True))


def test_gates_and_sums() -> None:
    x, y, gate = noise(7, 300) * 9, noise(7, 300, seed=5), noise(7, 1)
    for name, left in (("silu_mul", x), ("sigmoid_mul", x), ("add", x), ("sigmoid_mul", gate)):
        found = run(lambda ops, name=name, left=left: getattr(ops, name)(left, y))
        torch.testing.assert_close(found, getattr(REFERENCE, name)(left, y), rtol=3e-6, atol=1e-6)
    found = run(lambda ops: ops.add_gated(x, gate, y))
    torch.testing.assert_close(found, REFERENCE.add_gated(x, gate, y), rtol=3e-6, atol=1e-6)
    same_rows(lambda ops, r: [ops.silu_mul(x[r], y[r]), ops.add_gated(x[r], gate[r], y[r])], 7)


def test_gates_far_out() -> None:
    far = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, math.inf, math.nan]])
    found = run(lambda ops: ops.sigmoid_mul(far, torch.ones(1, 8)))
    assert found[0, :7].tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1, 1], abs=1e-30)
    assert math.isnan(found[0, 7])


def test_copies_are_exact() -> None:
    streams = noise(3, 11)
    assert torch.equal(run(lambda ops: ops.start_streams(streams, 4)), REFERENCE.start_streams(streams, 4))


@settings(max_examples=25)
@given(
    experts=st.sampled_from([3, 32, 100, 128, 129, 512, 600]),
    top_k=st.integers(1, 10),
    renormalise=st.booleans(),
    levels=st.sampled_from([2, 5, 1000]),
)
def test_router(experts: int, top_k: int, renormalise: bool, levels: int) -> None:
    """Few levels of logits: most are ties, which go to the lowest id."""
    top_k = min(top_k, experts)
    logits = torch.randint(0, levels, (3, experts), generator=torch.Generator().manual_seed(experts)) / levels
    ids, weights = run(lambda ops: ops.router(logits, top_k, renormalise=renormalise))
    expected_ids, expected = REFERENCE.router(logits, top_k, renormalise=renormalise)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=3e-6, atol=1e-7)


def test_router_of_special_logits() -> None:
    logits = noise(6, 40)
    logits[0, ::2] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4] = 0.0
    logits[4, 5:9] = -0.0
    ids, weights = run(lambda ops: ops.router(logits, 8, renormalise=True))
    assert ids.min() >= 0
    assert ids.max() < 40
    assert all(len(set(row)) == 8 for row in ids.tolist()), "no expert twice"
    assert all(i % 2 for i in ids[0].tolist()), "NaN last"
    assert ids[1].tolist() == ids[2].tolist() == list(range(8))
    assert ids[3, 0] == 7
    assert ids[4].tolist() == list(range(8)), "zeros of both signs are a tie"
    assert not weights[[4, 5]].isnan().any()
    same_rows(lambda ops, r: ops.router(logits[r], 8, renormalise=True), 6)


@settings(max_examples=20)
@given(columns=st.sampled_from([1, 31, 257, 4096, 9000]), rows=st.integers(1, 8), levels=st.sampled_from([2, 100]))
def test_largest_logit(columns: int, rows: int, levels: int) -> None:
    random = torch.Generator().manual_seed(columns + rows)
    logits = torch.randint(-levels, levels, (rows, columns), generator=random).float()
    found = run(lambda ops: ops.argmax_rows(logits))
    assert found.tolist() == REFERENCE.argmax(logits)


def test_largest_logit_of_special_rows() -> None:
    logits = noise(8, 5000)
    logits[0, 4321] = torch.nan
    logits[1, 17] = -torch.nan
    logits[2] = -torch.inf
    logits[3] = 0.0
    logits[3, :4] = -0.0
    logits[4, 100] = logits[4, 4999] = torch.inf
    logits[5, 2500] = logits[5, 2501] = 50.0
    found = run(lambda ops: ops.argmax_rows(logits)).tolist()
    assert found[:6] == [-1, -1, 0, 0, 100, 2500]
    assert found == REFERENCE.argmax(logits)
    same_rows(lambda ops, r: ops.argmax_rows(logits[r]), 8)


def test_argmax_is_not_recorded() -> None:
    with pytest.raises(EngineError, match="argmax_rows"):
        run(lambda ops: ops.argmax(noise(1, 4)))
