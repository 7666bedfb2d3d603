"""Norm, rope, router, gates, add and argmax of the native kernels against float64 and plain Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import Matrix, Ops
from tests.kernels.guard import Guarded
from tests.kernels.levels import on_every_level, same_bits

OPS: Any = Guarded(CpuOps())


def row_by_row(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The result for all rows, after comparing it with windows of every size down to single rows."""
    whole = on_every_level(lambda: compute(x))
    for size in range(1, min(9, len(x)) + 1):
        assert same_bits(torch.cat([compute(x[t : t + size]) for t in range(0, len(x), size)]), whole)
    return whole


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [1, 7, 16, 40, 128, 2050])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(columns: int, plus_one: bool) -> None:
    x, w = 3 * random(9, columns), random(columns, seed=1)
    y = row_by_row(lambda rows: OPS.rms_norm(rows, w, 1e-6, plus_one=plus_one), x)
    x64, w64 = x.double().numpy(), w.double().numpy() + plus_one
    exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * w64
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=(columns / 32 + 8) * 2.0**-24, atol=1e-30)


def test_rms_norm_takes_leading_axes() -> None:
    x, w = random(3, 5, 12), random(12, seed=1)
    assert same_bits(OPS.rms_norm(x, w, 1e-6), OPS.rms_norm(x.view(15, 12), w, 1e-6).view(3, 5, 12))


@pytest.mark.parametrize(("heads", "width", "half"), [(1, 8, 4), (3, 64, 16), (2, 33, 9), (5, 128, 64), (1, 2, 1)])
def test_rope(heads: int, width: int, half: int) -> None:
    angle = 100 * random(6, half, seed=2)
    cos, sin = angle.cos(), angle.sin()
    x = random(6, heads, width)
    y = on_every_level(lambda: OPS.rope(x, cos, sin))
    single = torch.cat([OPS.rope(x[t : t + 1], cos[t : t + 1], sin[t : t + 1]) for t in range(6)])
    assert same_bits(y, single)
    x64, c, s = x.double().numpy(), cos.double().numpy()[:, None], sin.double().numpy()[:, None]
    a, b = x64[..., :half], x64[..., half : 2 * half]
    exact = np.concatenate([a * c - b * s, b * c + a * s, x64[..., 2 * half :]], -1)
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=0, atol=1e-6)
    assert same_bits(y[..., 2 * half :].contiguous(), x[..., 2 * half :].contiguous())


def order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (row[e] != row[e], -row[e] if row[e] == row[e] else 0.0, e))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(
            st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0, float("nan"), float("-inf")]), min_size=21, max_size=21
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 21),
)
def test_router_order_with_ties_and_nan(rows: list[list[float]], top_k: int) -> None:
    ids, _ = OPS.router(torch.tensor(rows), top_k, renormalise=True)
    assert ids.dtype == torch.int32
    for row, picked in zip(rows, ids.tolist(), strict=True):
        assert picked == order(row)[:top_k]


@pytest.mark.parametrize("experts", [1, 8, 19, 128, 515])
@pytest.mark.parametrize("renormalise", [False, True])
def test_router_weights(experts: int, renormalise: bool) -> None:
    top_k = min(experts, 10)
    logits = 4 * random(9, experts, seed=3)
    y = row_by_row(lambda rows: OPS.router(rows, top_k, renormalise=renormalise)[1], logits)
    l64 = logits.double().numpy()
    p = np.exp(l64 - l64.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    exact = -np.sort(-p, -1)[:, :top_k]
    if renormalise:
        exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=2e-6, atol=0)


def test_router_shows_a_nan_in_its_weights() -> None:
    logits = random(2, 16, seed=4)
    logits[1, 3] = torch.nan
    ids, weights = OPS.router(logits, 4, renormalise=True)
    assert not weights[0].isnan().any()
    assert weights[1].isnan().all()
    assert 3 not in ids[1].tolist()


def test_silu_mul_and_sigmoid_mul() -> None:
    gate, x = 6 * random(9, 37), random(9, 37, seed=5)
    both = torch.stack([gate, x], 1)
    g, u = gate.double().numpy(), x.double().numpy()
    silu = row_by_row(lambda rows: OPS.silu_mul(rows[:, 0], rows[:, 1]), both)
    np.testing.assert_allclose(silu.double().numpy(), g / (1 + np.exp(-g)) * u, rtol=4e-7, atol=1e-30)
    gated = row_by_row(lambda rows: OPS.sigmoid_mul(rows[:, 0], rows[:, 1]), both)
    np.testing.assert_allclose(gated.double().numpy(), u / (1 + np.exp(-g)), rtol=4e-7, atol=1e-30)
    one = row_by_row(lambda rows: OPS.sigmoid_mul(rows[:, 0, :1], rows[:, 1]), both)
    assert same_bits(one, OPS.sigmoid_mul(gate[:, :1].expand(9, 37), x))


def test_large_elementwise_calls_use_threads_without_a_trace() -> None:
    gate, x = random(300, 1025), random(300, 1025, seed=6)
    results = []
    for threads in (1, 2, 3):
        pool.configure(threads)
        results.append(
            [OPS.silu_mul(gate, x), OPS.sigmoid_mul(gate, x), OPS.sigmoid_mul(gate[:, :1], x), OPS.add(gate, x)]
        )
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))
    assert same_bits(results[0][3], gate + x)  # one addition: no order to differ in


def test_argmax_takes_the_lowest_id_and_flags_nan() -> None:
    logits = random(8, 1003, seed=7)
    logits[1] = 0.0
    logits[2, [5, 900]] = 50.0
    logits[3, [0, 1002]] = torch.inf
    logits[4, 700] = torch.nan
    logits[5] = -torch.inf
    logits[6] = torch.nan
    logits[7, 1002] = 60.0
    for level in library.available_isa_levels():
        library.select_isa(level)
        assert OPS.argmax(logits) == [int(logits[0].argmax()), 0, 5, 0, -1, 0, -1, 1002]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=200))
def test_argmax_of_ties(row: list[int]) -> None:
    assert OPS.argmax(torch.tensor([row], dtype=torch.float32)) == [row.index(max(row))]


def test_swiglu_is_its_parts() -> None:
    gate, up = (Matrix("f32", random(24, 40, seed=s), 40) for s in (8, 9))
    down = Matrix("f32", random(40, 24, seed=10), 24)
    x = random(5, 40)
    y = row_by_row(lambda rows: OPS.swiglu(rows, gate, up, down), x)
    g, u = (x.double() @ m.data.double().T for m in (gate, up))
    exact = (g / (1 + (-g).exp()) * u) @ down.data.double().T
    np.testing.assert_allclose(y.double().numpy(), exact.numpy(), rtol=0, atol=3e-4)


def test_every_operation_of_the_protocol_is_there_with_its_signature() -> None:
    names = [name for name in vars(Ops) if not name.startswith("_") and callable(getattr(Ops, name))]
    assert len(names) > 20
    for name in names:
        wanted, found = inspect.signature(getattr(Ops, name)), inspect.signature(getattr(CpuOps, name))
        # Without self, which a composed operation declares as what it needs.
        assert list(wanted.parameters.values())[1:] == list(found.parameters.values())[1:], name


def test_shapes_that_do_not_agree_are_refused() -> None:
    x = random(2, 8)
    for call in (
        lambda: OPS.add(x, random(2, 9)),
        lambda: OPS.silu_mul(x, random(1, 8)),
        lambda: OPS.sigmoid_mul(random(1, 1), x),
        lambda: OPS.rms_norm(x, random(7), 1e-6),
        lambda: OPS.rope(random(2, 1, 8), random(3, 2), random(3, 2)),
        lambda: OPS.rope(random(2, 1, 8), random(2, 5), random(2, 5)),
        lambda: OPS.router(x, 9, renormalise=True),
    ):
        with pytest.raises(EngineError):
            call()
