"""The recorded gated delta net against the reference: convolution, inputs, recurrence, folding, gated norm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.ops import DeltaRows, DeltaWeights
from strata.kernels.reference import ReferenceOps
from tests.kernels.cuda_runs import Run, equal, noise, run, same_rows

REFERENCE = ReferenceOps()


@settings(max_examples=15)
@given(rows=st.integers(1, 8), channels=st.integers(1, 70), taps=st.integers(2, 5), dilation=st.sampled_from([1, 3]))
def test_convolution(rows: int, channels: int, taps: int, dilation: int) -> None:
    x, tail, weight = noise(rows, channels), noise((taps - 1) * dilation, channels), noise(channels, taps)
    found = run(lambda ops: ops.causal_conv(x, tail, weight, dilation))
    torch.testing.assert_close(found, REFERENCE.causal_conv(x, tail, weight, dilation), rtol=1e-5, atol=2e-6)


def delta_weights(keys: int, heads: int, key_width: int, width: int) -> DeltaWeights:
    channels = 2 * keys * key_width + heads * width
    return DeltaWeights(noise(channels, 4), noise(heads), noise(heads, seed=3), keys, heads, key_width, width)


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 6, 16, 20), (2, 2, 130, 33), (1, 3, 256, 5)])
def test_inputs(shape: tuple[int, int, int, int]) -> None:
    weights, rows = delta_weights(*shape), 5
    channels, heads = weights.conv_CW.shape[0], weights.value_heads
    qkv, tail, b, a = noise(rows, channels), noise(3, channels), noise(rows, heads), noise(rows, heads) * 9
    a[0, 0], a[1, 0] = 40.0, -40.0
    found_q, found = run(lambda ops: ops.delta_inputs(qkv, tail, b, a, weights))
    expected_q, expected = REFERENCE.delta_inputs(qkv, tail, b, a, weights)
    torch.testing.assert_close(found_q, expected_q, rtol=1e-5, atol=1e-6)
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-5, atol=2e-6)


def test_rows_of_inputs() -> None:
    """A row of a window alone has the rows before it in its tail."""
    weights, rows = delta_weights(2, 4, 32, 16), 8
    channels = weights.conv_CW.shape[0]
    z, b, a = noise(3 + rows, channels), noise(rows, 4), noise(rows, 4)

    def found(r: slice) -> list[torch.Tensor]:
        q, made = run(lambda ops: ops.delta_inputs(
            z[3 + r.start : 3 + r.stop], z[r.start : 3 + r.start], b[r], a[r], weights))  # fmt: skip
        return [q, *vars(made).values()]

    whole = found(slice(0, rows))
    for t in range(rows):
        assert all(equal(x[t : t + 1], y) for x, y in zip(whole, found(slice(t, t + 1)), strict=True))


def delta_rows(count: int, keys: int, heads: int, key_width: int, width: int, seed: int) -> DeltaRows:
    k = noise(count, keys, key_width, seed=seed)
    return DeltaRows(
        k / k.norm(dim=-1, keepdim=True),
        noise(count, heads, width, seed=seed),
        noise(count, heads, seed=seed).sigmoid(),
        -noise(count, heads, seed=seed + 1).abs(),
    )


SHAPES = [(1, 1, 4, 3), (2, 6, 32, 33), (1, 2, 100, 64), (2, 2, 130, 40), (1, 1, 256, 32)]


@pytest.mark.parametrize("accepted", [0, 1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence(shape: tuple[int, int, int, int], accepted: int) -> None:
    keys, heads, key_width, width = shape
    now, pending = delta_rows(3, *shape, seed=1), delta_rows(MAX_WINDOW, *shape, seed=2)
    q, state = noise(3, keys, key_width), noise(heads, key_width, width)
    expected_state = state.clone()
    expected = REFERENCE.gated_delta(q, now, expected_state, pending.first(accepted), write=False)
    found = run(lambda ops: ops.gated_delta(q, now, state, pending, write=False), accepted=accepted)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_and_folds_of_any_size_give_the_same_bits(shape: tuple[int, int, int, int]) -> None:
    keys, heads, key_width, width = shape
    rows, q = delta_rows(10, *shape, seed=5), noise(10, keys, key_width)
    start = noise(heads, key_width, width)

    def decode(sizes: list[int], *, backward: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        state, outputs, done, accepted = start.clone(), [], 0, 0
        pending = DeltaRows(*(torch.full((MAX_WINDOW, *x.shape[1:]), torch.nan) for x in vars(rows).values()))
        for size in sizes:
            window = DeltaRows(*(x[done : done + size] for x in vars(rows).values()))
            one = Run.new(backward=backward).set(accepted=accepted)
            out = one.ops.gated_delta(q[done : done + size], window, state, pending, write=False)
            one.go()
            outputs.append(out)
            for kept, new in zip(vars(pending).values(), vars(window).values(), strict=True):
                kept[:size] = new
            done, accepted = done + size, size
        return torch.cat(outputs), state

    one_by_one, state = decode([1] * 10)
    for sizes in ([8, 2], [3, 4, 3], [1, 8, 1]):
        found, _ = decode(sizes, backward=True)
        assert equal(found, one_by_one)
    assert equal(decode([4, 5, 1])[1], state), "both have all rows but the last in their state"


def test_a_prompt_is_not_recorded() -> None:
    rows = delta_rows(1, 1, 1, 4, 4, seed=0)
    with pytest.raises(EngineError, match="writes no state"):
        run(lambda ops: ops.gated_delta(noise(1, 1, 4), rows, noise(1, 4, 4), None, write=True))


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
@pytest.mark.parametrize("width", [5, 32, 130])
def test_gated_norm(gate: str, width: int) -> None:
    o, z, weight = noise(5, 3, width), noise(5, 3, width, seed=1), noise(width)
    found = run(lambda ops: ops.gated_norm(o, z, weight, 1e-6, gate))  # type: ignore[arg-type]
    expected = REFERENCE.gated_norm(o, z, weight, 1e-6, gate)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-6)
    same_rows(lambda ops, r: ops.gated_norm(o[r], z[r], weight, 1e-6, gate), 5)  # type: ignore[arg-type]
