"""The native gated delta net against float64; windows, folds, prompts, levels and threads give the same bits."""

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
from strata.kernels.ops import DeltaRows, DeltaWeights
from tests.kernels.guard import Guarded
from tests.kernels.levels import on_every_level, same_bits

OPS: Any = Guarded(CpuOps())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(y: torch.Tensor, exact: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=0, atol=atol)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def convolution(x: np.ndarray, tail: np.ndarray, weight: np.ndarray, dilation: int) -> np.ndarray:
    z = np.concatenate([tail, x])
    out = np.zeros_like(x)
    for t in range(len(x)):
        for w in range(weight.shape[1]):
            out[t] += weight[:, w] * z[t + w * dilation]
    return out * sigmoid(out)


@pytest.mark.parametrize(
    ("channels", "taps", "dilation"), [(1, 4, 1), (37, 4, 3), (64, 2, 1), (130, 4, 1), (9, 1, 1), (5, 8, 2)]
)
def test_causal_conv(channels: int, taps: int, dilation: int) -> None:
    x, weight = random(11, channels), random(channels, taps, seed=1)
    tail = random((taps - 1) * dilation, channels, seed=2)
    (y,) = on_every_level(lambda: [OPS.causal_conv(x, tail, weight, dilation)])
    close(y, convolution(x.double().numpy(), tail.double().numpy(), weight.double().numpy(), dilation), 3e-6)
    z = torch.cat([tail, x])
    for size in range(1, 10):
        parts = [OPS.causal_conv(x[t : t + size], z[t : t + len(tail)], weight, dilation) for t in range(0, 11, size)]
        assert same_bits(torch.cat(parts), y)


def make_weights(key_heads: int, value_heads: int, key_width: int, value_width: int) -> DeltaWeights:
    channels = 2 * key_heads * key_width + value_heads * value_width
    return DeltaWeights(
        conv_CW=random(channels, 4, seed=3),
        log_decay_N=random(value_heads, seed=4),
        dt_bias_N=random(value_heads, seed=5),
        key_heads=key_heads,
        value_heads=value_heads,
        key_width=key_width,
        value_width=value_width,
    )


@pytest.mark.parametrize("sizes", [(1, 1, 8, 8), (2, 6, 24, 20), (3, 3, 33, 7), (2, 4, 128, 128)])
def test_delta_inputs(sizes: tuple[int, int, int, int]) -> None:
    weights = make_weights(*sizes)
    keys, heads, key_width, width = sizes
    channels = weights.conv_CW.shape[0]
    qkv, tail = random(9, channels, seed=6), random(3, channels, seed=7)
    b, a = 3 * random(9, heads, seed=8), 8 * random(9, heads, seed=9)

    def compute(first: int = 0, last: int = 9) -> list[torch.Tensor]:
        before = torch.cat([tail, qkv])[first : first + 3]
        q, rows = OPS.delta_inputs(qkv[first:last], before, b[first:last], a[first:last], weights)
        return [q, rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN]

    found = on_every_level(compute)
    for size in range(1, 9):
        parts = [compute(t, min(t + size, 9)) for t in range(0, 9, size)]
        assert all(same_bits(torch.cat([p[i] for p in parts]), found[i]) for i in range(5))

    mixed = convolution(qkv.double().numpy(), tail.double().numpy(), weights.conv_CW.double().numpy(), 1)
    q, k, v = np.split(mixed, [keys * key_width, 2 * keys * key_width], axis=1)
    q, k = (x.reshape(9, keys, key_width) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    rate = np.logaddexp(0, a.double().numpy() + weights.dt_bias_N.double().numpy())
    close(found[0], q * key_width**-0.5, 1e-6)
    close(found[1], k, 1e-6)
    close(found[2], v.reshape(9, heads, width), 5e-6)
    close(found[3], sigmoid(b.double().numpy()), 2e-7)
    exact = -np.exp(weights.log_decay_N.double().numpy()) * rate
    np.testing.assert_allclose(found[4].double().numpy(), exact, rtol=1e-6, atol=0)


def make_rows(
    rows: int, keys: int, heads: int, key_width: int, width: int, seed: int
) -> tuple[torch.Tensor, DeltaRows]:
    k = torch.nn.functional.normalize(random(rows, keys, key_width, seed=seed), dim=-1)
    q = torch.nn.functional.normalize(random(rows, keys, key_width, seed=seed + 1), dim=-1)
    beta = random(rows, heads, seed=seed + 2).sigmoid()
    g = -random(rows, heads, seed=seed + 3).abs()
    return q, DeltaRows(k, random(rows, heads, width, seed=seed + 4), beta, g)


def recurrence(q: torch.Tensor, rows: DeltaRows, state: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    s = state.double().numpy().copy()
    v, beta, g = (x.double().numpy() for x in (rows.v_TNV, rows.beta_TN, rows.g_TN))
    share = v.shape[1] // q.shape[1]
    q64, k64 = (x.double().numpy().repeat(share, axis=1) for x in (q, rows.k_TGD))
    o = np.zeros_like(v)
    for t in range(len(v)):
        for n in range(v.shape[1]):
            s[n] *= np.exp(g[t, n])
            d = (v[t, n] - s[n].T @ k64[t, n]) * beta[t, n]
            s[n] += np.outer(k64[t, n], d)
            o[t, n] = s[n].T @ q64[t, n]
    return o, s


SIZES = [(1, 1, 8, 8), (2, 6, 24, 40), (1, 3, 33, 31), (2, 2, 128, 128), (1, 1, 1, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_gated_delta_is_the_float64_recurrence(sizes: tuple[int, int, int, int]) -> None:
    _, heads, key_width, width = sizes
    q, rows = make_rows(9, *sizes, seed=10)
    start = random(heads, key_width, width, seed=20)

    def compute() -> list[torch.Tensor]:
        state = start.clone()
        return [OPS.gated_delta(q, rows, state, None, write=True), state]

    o, state = on_every_level(compute)
    exact_o, exact_state = recurrence(q, rows, start)
    close(o, exact_o, 4e-6)
    close(state, exact_state, 4e-6)


def slice_rows(q: torch.Tensor, rows: DeltaRows, first: int, last: int) -> tuple[torch.Tensor, DeltaRows]:
    parts = (rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN)
    return q[first:last], DeltaRows(*(x[first:last] for x in parts))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from(SIZES),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_windows_with_rejected_rows_equal_one_prompt(
    sizes: tuple[int, int, int, int], windows: list[tuple[int, int]], threads: int, seed: int
) -> None:
    """Each window runs some rows; a prefix of any length is accepted and folded by the next call. The accepted rows,
    run as one prompt, leave the same state and the same outputs."""
    pool.configure(threads)
    _, heads, key_width, width = sizes
    total = sum(size for size, _ in windows)
    q, rows = make_rows(total, *sizes, seed=seed)
    start = random(heads, key_width, width, seed=seed + 9)
    state, pending = start.clone(), None
    outputs, kept = [], []
    first = 0
    for size, wish in windows:
        accepted = min(size, wish)
        window_q, window = slice_rows(q, rows, first, first + size)
        o = OPS.gated_delta(window_q, window, state, pending, write=False)
        outputs.append(o[:accepted])
        pending = window.first(accepted)
        kept += list(range(first, first + accepted))
        first += size
    last_q, last = slice_rows(q, rows, 0, 1)
    outputs.append(OPS.gated_delta(last_q, last, state, pending, write=True))

    order = [*kept, 0]
    parts = (rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN)
    prompt = DeltaRows(*(x[order] for x in parts))
    expected_state = start.clone()
    expected = OPS.gated_delta(q[order], prompt, expected_state, None, write=True)
    assert same_bits(torch.cat(outputs), expected)
    assert same_bits(state, expected_state)


def test_a_window_leaves_the_state_alone() -> None:
    q, rows = make_rows(4, 2, 4, 16, 24, seed=30)
    state = random(4, 16, 24, seed=31)
    before = state.clone()
    OPS.gated_delta(q, rows, state, None, write=False)
    assert same_bits(state, before)
    OPS.gated_delta(q, rows, state, rows.first(0), write=False)
    assert same_bits(state, before)


def test_a_late_nan_row_does_not_reach_earlier_ones() -> None:
    q, rows = make_rows(4, 1, 2, 16, 24, seed=32)
    state = random(2, 16, 24, seed=33)
    clean = OPS.gated_delta(q, rows, state, None, write=False)
    rows.v_TNV[2, 0] = torch.nan
    o = OPS.gated_delta(q, rows, state, None, write=False)
    assert same_bits(o[:2], clean[:2])
    assert o[2:, 0].isnan().all()
    assert same_bits(o[:, 1].contiguous(), clean[:, 1].contiguous())


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
@pytest.mark.parametrize("width", [1, 8, 20, 128])
def test_gated_norm(gate: str, width: int) -> None:
    o, z, weight = 2 * random(5, 3, width, seed=40), 3 * random(5, 3, width, seed=41), random(width, seed=42)
    (y,) = on_every_level(lambda: [OPS.gated_norm(o, z, weight, 1e-6, gate)])
    o64, z64, w64 = (x.double().numpy() for x in (o, z, weight))
    normed = o64 / np.sqrt((o64**2).mean(-1, keepdims=True) + 1e-6) * w64
    close(y, normed * sigmoid(z64) * (z64 if gate == "silu" else 1.0), 5e-6)
    assert same_bits(torch.cat([OPS.gated_norm(o[t : t + 1], z[t : t + 1], weight, 1e-6, gate) for t in range(5)]), y)


def test_what_does_not_fit_is_refused() -> None:
    q, rows = make_rows(2, 2, 4, 16, 24, seed=50)
    with pytest.raises(EngineError, match="gated_delta shapes"):
        OPS.gated_delta(q, rows, torch.zeros(4, 16, 25), None, write=True)
    with pytest.raises(EngineError, match="in place"):
        OPS.gated_delta(q, rows, torch.zeros(4, 24, 16).mT, None, write=True)
    few = DeltaRows(rows.k_TGD, rows.v_TNV[:, :3], rows.beta_TN[:, :3], rows.g_TN[:, :3])
    with pytest.raises(EngineError, match="3 value heads on 2 key heads"):
        OPS.gated_delta(q, few, torch.zeros(3, 16, 24), None, write=True)
    with pytest.raises(EngineError, match="causal_conv tail"):
        OPS.causal_conv(random(2, 5), random(2, 5), random(5, 4))
    with pytest.raises(EngineError, match="9 taps"):
        OPS.causal_conv(random(2, 5), random(8, 5), random(5, 9))


def test_a_long_chunk_gives_the_bits_of_its_windows() -> None:
    weights = make_weights(2, 4, 16, 20)
    channels = weights.conv_CW.shape[0]
    qkv, tail = random(600, channels, seed=60), random(3, channels, seed=61)
    b, a = random(600, 4, seed=62), random(600, 4, seed=63)
    q, rows = OPS.delta_inputs(qkv, tail, b, a, weights)
    z = torch.cat([tail, qkv])
    for t in (0, 254, 511, 594):
        here = slice(t, t + 6)
        few_q, few = OPS.delta_inputs(qkv[here], z[t : t + 3], b[here], a[here], weights)
        assert same_bits(few_q, q[here])
        for name in ("k_TGD", "v_TNV", "beta_TN", "g_TN"):
            assert same_bits(getattr(few, name), getattr(rows, name)[here])
