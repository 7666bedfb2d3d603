"""The reference operations against plain loops: ties, NaN, sparse lists, the delta rule in chunks, formats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights, Matrix, NgramWeights
from strata.kernels.reference import ReferenceOps, dense_weight
from strata.kernels.reference.delta import chunked_delta, recurrent_delta

OPS = ReferenceOps()
NAN = float("nan")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_router_breaks_ties_by_id_and_keeps_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, weights = OPS.router(logits, 4, renormalise=False)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    assert torch.allclose(weights[0], logits[0].softmax(-1)[[1, 2, 4, 3]])
    assert torch.allclose(OPS.router(logits, 4, renormalise=True)[1].sum(-1), torch.ones(2))


def test_router_survives_nan() -> None:
    ids, _ = OPS.router(torch.tensor([[NAN, 1.0, NAN, 2.0], [NAN, NAN, NAN, NAN]]), 3, renormalise=True)
    assert ids.tolist() == [[3, 1, 0], [0, 1, 2]]


def test_argmax_is_the_lowest_id_and_names_nan() -> None:
    assert OPS.argmax(torch.tensor([[1.0, 5.0, 5.0], [0.0, 0.0, 0.0], [1.0, NAN, 0.0], [-1.0, -math.inf, -1.0]])) == [
        1,
        0,
        -1,
        0,
    ]


@pytest.mark.parametrize("columns", [64, 40])
def test_q8_0_weights_are_data_times_scale(columns: int) -> None:
    data = torch.randint(-128, 128, (3, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scales = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, 3.0]], dtype=torch.float16)
    matrix = Matrix("q8_0", data, columns, scales)
    for row in range(3):
        for column in range(columns):
            expected = float(data[row, column]) * float(scales[row, column // 32])
            assert float(dense_weight(matrix)[row, column]) == expected
    assert torch.equal(OPS.embedding([2, 0, 2], matrix), dense_weight(matrix)[[2, 0, 2]])
    x = noise(2, columns)
    assert torch.equal(OPS.linear(x, matrix), x @ dense_weight(matrix).T)


def test_bf16_embedding_and_weights() -> None:
    data = noise(5, 8).bfloat16()
    assert torch.equal(OPS.embedding([4, 1], Matrix("bf16", data, 8)), data[[4, 1]].float())


def plain_blocks(q: torch.Tensor, keys: torch.Tensor, start: int, block: int, top: int) -> list[list[int]]:
    listed = []
    for t in range(q.shape[0]):
        complete = (start + t + 1) // block
        scores = []
        for b in range(complete):
            score = sum(
                max(0.0, float(head @ keys[b])) if not math.isnan(float(head @ keys[b])) else NAN for head in q[t]
            )
            scores.append(-1.0 if math.isnan(score) else score)
        best = sorted(range(complete), key=lambda b: (-scores[b], b))[:top]
        listed.append(sorted(best) + [-1] * (top - len(best)))
    return listed


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_select_blocks_equals_plain_sorting(data: st.DataObject) -> None:
    """Small integers make exact scores with many ties."""
    rows, start = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 40))
    block, top, heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (rows, heads, 4), generator=generator).float()
    keys = torch.randint(-2, 3, ((start + rows) // block + 1, 4), generator=generator).float()
    if data.draw(st.booleans()) and keys.shape[0] > 2:
        keys[1, 0] = NAN
    found = OPS.select_blocks(q, keys, start, block, top)
    assert found.dtype == torch.int32
    assert found.tolist() == plain_blocks(q, keys, start, block, top)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data())
def test_sparse_attention_equals_masked_attention(data: st.DataObject) -> None:
    rows, start, block = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 30)), data.draw(st.integers(1, 5))
    top, seed = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1000))
    q, k, v = (
        noise(rows, 4, 8, seed=seed),
        noise(start + rows, 2, 8, seed=seed + 1),
        noise(start + rows, 2, 8, seed=seed + 2),
    )
    blocks = OPS.select_blocks(noise(rows, 2, 4, seed=seed + 3), noise(40, 4, seed=seed + 4), start, block, top)
    found = OPS.sparse_attention(q, k, v, start, 0.3, blocks, block)
    for t in range(rows):
        tail = (start + t + 1) // block * block
        seen = [b * block + j for b in blocks[t].tolist() if b >= 0 for j in range(block)]
        seen += range(tail, start + t + 1)
        for head in range(4):
            weights = torch.softmax(k[seen, head // 2] @ q[t, head] * 0.3, 0)
            assert torch.allclose(found[t, head], weights @ v[seen, head // 2], atol=1e-5)


def test_full_list_equals_dense_attention() -> None:
    q, k, v = noise(3, 4, 8), noise(23, 2, 8, seed=1), noise(23, 2, 8, seed=2)
    blocks = OPS.select_blocks(noise(3, 2, 4), noise(9, 4), 20, 4, 8)
    dense = OPS.attention(q, k, v, 20, 0.3)
    assert torch.allclose(OPS.sparse_attention(q, k, v, 20, 0.3, blocks, 4), dense, atol=1e-6)
    assert torch.equal(OPS.sparse_attention(q, k, v, 20, 0.3, None, 4), dense)


def test_attention_in_slices_equals_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = noise(9, 4, 8), noise(20, 2, 8, seed=1), noise(20, 2, 8, seed=2)
    blocks = OPS.select_blocks(noise(9, 2, 4), noise(9, 4), 11, 4, 2)
    whole = (OPS.attention(q, k, v, 11, 0.3), OPS.sparse_attention(q, k, v, 11, 0.3, blocks, 4))
    monkeypatch.setattr("strata.kernels.reference.sparse.SCORE_ELEMENTS", 200)
    assert torch.allclose(OPS.attention(q, k, v, 11, 0.3), whole[0], atol=1e-6)
    assert torch.allclose(OPS.sparse_attention(q, k, v, 11, 0.3, blocks, 4), whole[1], atol=1e-6)


def delta_inputs(batch: int, rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    q, k = noise(batch, rows, 2, 8, seed=seed), noise(batch, rows, 2, 8, seed=seed + 1)
    v = noise(batch, rows, 6, 5, seed=seed + 2)
    beta = noise(batch, rows, 6, seed=seed + 3).sigmoid()
    g = -noise(batch, rows, 6, seed=seed + 4).abs() * 3
    state = noise(batch, 6, 8, 5, seed=seed + 5)
    return (*(x.double() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, beta, g)), state.double())


def plain_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, state = torch.zeros_like(v), state.clone()
    for t in range(v.shape[0]):
        for n in range(6):
            s = state[n] * math.exp(float(g[t, n]))
            change = (v[t, n] - s.T @ k[t, n // 3]) * beta[t, n]
            state[n] = s + torch.outer(k[t, n // 3], change)
            out[t, n] = state[n].T @ q[t, n // 3]
    return out, state


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_recurrent_delta_equals_plain_loops(rows: int) -> None:
    inputs = delta_inputs(2, rows, 1)
    out, state = recurrent_delta(*inputs)
    assert out is not None
    for b in range(2):
        expected = plain_delta(*(x[b] for x in inputs))
        assert torch.allclose(out[b], expected[0], atol=1e-12)
        assert torch.allclose(state[b], expected[1], atol=1e-12)


@pytest.mark.parametrize(("rows", "chunk"), [(1, 64), (63, 64), (64, 64), (65, 64), (200, 64), (50, 7), (5, 1)])
def test_chunked_delta_equals_recurrent(rows: int, chunk: int) -> None:
    inputs = delta_inputs(2, rows, rows)
    expected = recurrent_delta(*inputs)
    out, state = chunked_delta(*inputs, chunk=chunk)
    assert expected[0] is not None
    assert torch.allclose(out, expected[0], atol=1e-10)
    assert torch.allclose(state, expected[1], atol=1e-10)


def test_chunked_delta_keeps_decay_that_underflows() -> None:
    """exp(l_i - l_j) is formed from the difference: a decay of e^-4000 in a chunk gives zeros, not NaN."""
    q, k, v, beta, g, state = delta_inputs(1, 128, 3)
    out, after = chunked_delta(q, k, v, beta, g - 50, state)
    expected = recurrent_delta(q, k, v, beta, g - 50, state)
    assert expected[0] is not None
    assert torch.allclose(out, expected[0], atol=1e-10)
    assert torch.allclose(after, expected[1], atol=1e-10)


def rows_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor) -> DeltaRows:
    return DeltaRows(k[0].float(), v[0].float(), beta[0].float(), g[0].float())


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_gated_delta_writes_only_what_it_says(rows: int) -> None:
    *now, _ = delta_inputs(1, rows, 8)
    *before, state = delta_inputs(1, 3, 9)
    q = now[0][0].float()
    state = state[0].float()
    expected_fold = plain_delta(*(x[0] for x in before), state.double())[1]
    expected_out, expected_after = plain_delta(*(x[0] for x in now), expected_fold)
    for write in (False, True):
        matrix = state.clone()
        out = OPS.gated_delta(q, rows_of(*now), matrix, rows_of(*before), write=write)
        assert torch.allclose(out.double(), expected_out, atol=1e-5)
        assert torch.allclose(matrix.double(), expected_after if write else expected_fold, atol=1e-5)
    matrix = state.clone()
    OPS.gated_delta(q, rows_of(*now), matrix, None, write=False)
    assert torch.equal(matrix, state)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (4, 3), (2, 5), (3, 2)])
def test_causal_conv_equals_plain_sum(taps: int, dilation: int) -> None:
    tail_rows = (taps - 1) * dilation
    x, tail, weight = noise(7, 3), noise(tail_rows, 3, seed=1), noise(3, taps, seed=2)
    found = OPS.causal_conv(x, tail, weight, dilation)
    everything = torch.cat((tail, x))
    for t in range(7):
        for c in range(3):
            total = sum(float(weight[c, w] * everything[t + w * dilation, c]) for w in range(taps))
            assert float(found[t, c]) == pytest.approx(total / (1 + math.exp(-total)), abs=1e-6)


def test_delta_inputs_equal_plain_formulas() -> None:
    weights = DeltaWeights(noise(2 * 2 * 4 + 6 * 3, 4, seed=1), noise(6, seed=2), noise(6, seed=3), 2, 6, 4, 3)
    qkv, tail = noise(5, 34, seed=4), noise(3, 34, seed=5)
    b, a = noise(5, 6, seed=6), noise(5, 6, seed=7) * 30
    q, rows = OPS.delta_inputs(qkv, tail, b, a, weights)
    mixed = OPS.causal_conv(qkv, tail, weights.conv_CW)
    for t in range(5):
        for h in range(2):
            raw = mixed[t, h * 4 : h * 4 + 4]
            norm = math.sqrt(float((raw * raw).sum()) + 1e-6)
            assert torch.allclose(q[t, h], raw / norm / 2, atol=1e-6)
            raw = mixed[t, 8 + h * 4 : 12 + h * 4]
            assert torch.allclose(rows.k_TGD[t, h], raw / math.sqrt(float((raw * raw).sum()) + 1e-6), atol=1e-6)
        for n in range(6):
            assert torch.equal(rows.v_TNV[t, n], mixed[t, 16 + 3 * n : 19 + 3 * n])
            assert float(rows.beta_TN[t, n]) == pytest.approx(1 / (1 + math.exp(-float(b[t, n]))), rel=1e-6)
            x = float(a[t, n]) + float(weights.dt_bias_N[n])
            soft = x if x > 20 else math.log1p(math.exp(x))
            assert float(rows.g_TN[t, n]) == pytest.approx(-math.exp(float(weights.log_decay_N[n])) * soft, rel=1e-5)


def test_hyper_mix_and_add_equal_plain_formulas() -> None:
    streams, hidden, rank = 3, 5, 2
    wide = streams * hidden
    parts = [noise(rank, wide, seed=1), noise(wide, rank, seed=2), noise(streams, wide, seed=3)]
    down, up, inject = (Matrix("f32", one, one.shape[1]) for one in parts)
    norm, x, y = noise(streams, hidden, seed=4), noise(2, streams, hidden, seed=5), noise(2, hidden, seed=6)
    u, c = OPS.hyper_mix(x, HyperWeights(norm, down, up, inject, 1e-3))
    assert c is not None
    for t in range(2):
        n = torch.stack([x[t, s] / torch.sqrt((x[t, s] ** 2).mean() + 1e-3) * (1 + norm[s]) for s in range(streams)])
        low = parts[0] @ n.flatten() / streams
        m = torch.sigmoid(parts[1] @ (low * torch.sigmoid(low))).view(streams, hidden)
        assert torch.allclose(u[t], (m * n).sum(0) / streams, atol=1e-6)
        assert torch.allclose(c[t], 2 * torch.sigmoid(parts[2] @ n.flatten() / streams), atol=1e-6)
        for s in range(streams):
            assert torch.allclose(OPS.hyper_add(x, c, y)[t, s], x[t, s] + c[t, s] * y[t], atol=1e-6)
    assert OPS.hyper_mix(x, HyperWeights(norm, down, up, None, 1e-3))[1] is None


def test_ngram_gate_equals_plain_formulas() -> None:
    key, value, x = noise(2, 3, 5), noise(2, 5, seed=1), noise(2, 3, 5, seed=2)
    key[1, 2] = 0  # no match at all: the root's floor and sign decide
    norms = [noise(3, 5, seed=seed) for seed in (3, 4, 5)]
    gated, normed = OPS.ngram_gate(key, value, x, NgramWeights(*norms, 1e-6))

    def norm(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return v / torch.sqrt((v * v).mean() + 1e-6) * (1 + w)

    for t in range(2):
        for s in range(3):
            match = float(norm(key[t, s], norms[0][s]) @ norm(x[t, s], norms[1][s])) / math.sqrt(5)
            sign = (match > 0) - (match < 0)
            root = sign * math.sqrt(max(abs(match), 1e-6))
            expected = value[t] / (1 + math.exp(-root))
            assert torch.allclose(gated[t, s], expected, atol=1e-5)
            assert torch.allclose(normed[t, s], norm(expected, norms[2][s]), atol=1e-5)


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_gated_norm_weight_is_plain(gate: str) -> None:
    o, z, weight = noise(2, 3, 4), noise(2, 3, 4, seed=1), noise(4, seed=2)
    found = OPS.gated_norm(o, z, weight, 1e-6, gate)  # type: ignore[arg-type]
    factor = torch.sigmoid(z) * (z if gate == "silu" else 1)
    expected = weight * o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6) * factor
    assert torch.allclose(found, expected, atol=1e-6)
