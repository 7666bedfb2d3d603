"""Every native row operation as a function of its rows, with what float64 or plain Python say of them.

A case is computed for any rows [first, first + count) of its inputs; row t of the result must be the same bits whatever
the window is. Inputs of a call end at forbidden memory and what nobody wrote is NaN (guard.py), so that a tail of rows
that is read from elsewhere shows. Mirrors are those of the operations' own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import DeltaRows, Matrix, NgramWeights
from tests.kernels import test_rows_attention as attention
from tests.kernels import test_rows_delta as delta
from tests.kernels import test_rows_index as index
from tests.kernels import test_rows_streams as streams
from tests.kernels.guard import Room, everything_behind
from tests.kernels.levels import same_bits
from tests.kernels.test_rows_linear import FORMATS, make_matrix, tolerance

OPS: Any = CpuOps()
ROWS = 600  # a chunk of 512 rows and what is left of one
MIB = 2**20

Tensors = list[torch.Tensor]
Arrays = Sequence[np.ndarray]


@dataclass
class Case:
    """``inputs`` have ROWS rows each; ``compute(first, rows)`` gets them cut, and the number of the first row.

    ``exact``: float64 of all rows, one for each result; ``allowed``: how far each may be off.
    """

    inputs: Tensors
    compute: Callable[[int, Tensors], Tensors]
    exact: Arrays
    allowed: Sequence[Any]
    rooms: list[Room] = field(default_factory=list)

    def run(self, first: int, count: int) -> Tensors:
        if not self.rooms:
            self.rooms = [Room(x.numel() * x.element_size()) for x in self.inputs]
        cut = [room.place(x[first : first + count]) for room, x in zip(self.rooms, self.inputs, strict=True)]
        return self.compute(first, cut)

    def assert_exact(self, results: Tensors) -> None:
        for y, exact, allowed in zip(results, self.exact, self.allowed, strict=True):
            error = np.abs(y.double().numpy() - exact)
            assert (error <= allowed).all(), f"{np.nanmax(error)} off; {np.isnan(error).sum()} are NaN"


def fixed(value: Any) -> Any:
    """Weights, placed once before forbidden memory."""
    return everything_behind(value, [])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def f64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def linear(kind: str, columns: int = 513, outputs: int = 9, seed: int = 1) -> Case:
    matrix, w = make_matrix(outputs, columns, kind, seed)
    x = random(ROWS, columns, seed=seed)
    placed = fixed(matrix)
    exact = f64(x) @ w.T
    return Case([x], lambda _, rows: [OPS.linear(rows[0], placed)], [exact], [tolerance(x.numpy(), w, kind)])


def embedding(kind: str) -> Case:
    matrix, w = make_matrix(37, 50, kind, 2)
    placed, ids = fixed(matrix), torch.arange(ROWS) * 29 % 37
    return Case([ids], lambda _, rows: [OPS.embedding(rows[0].tolist(), placed)], [w[ids.numpy()]], [0.0])


def rms_norm() -> Case:
    x, w = 3 * random(ROWS, 45), fixed(random(45, seed=1))
    exact = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + 1e-6) * f64(w)
    return Case([x], lambda _, rows: [OPS.rms_norm(rows[0], w, 1e-6)], [exact], [1e-6 * np.abs(exact) + 1e-30])


def rope() -> Case:
    angle = 100 * random(ROWS, 9, seed=2)
    x, cos, sin = random(ROWS, 2, 33), angle.cos(), angle.sin()
    a, b, c, s = f64(x[..., :9]), f64(x[..., 9:18]), f64(cos)[:, None], f64(sin)[:, None]
    exact = np.concatenate([a * c - b * s, b * c + a * s, f64(x[..., 18:])], -1)
    return Case([x, cos, sin], lambda _, rows: [OPS.rope(*rows)], [exact], [1e-6])


def attend(kind: torch.dtype, start: int = 40) -> Case:
    q, k, v = attention.make_cache(ROWS, 4, 2, 12, start, kind, 3)
    exact = attention.expected(q, k, v, attention.causal(ROWS, start), 0.3)
    caches = fixed([k, v])
    return Case([q], lambda t, rows: [OPS.attention(rows[0], *caches, start + t, 0.3)], [exact], [4e-6])


def sparse(kind: torch.dtype, start: int = 40) -> Case:
    q, k, v = index.make_cache(ROWS, 4, 2, 12, start, kind)
    lists = index.random_lists(ROWS, start, 4, 12, seed=7)
    exact = attention.expected(q, k, v, [index.positions(lists, t, start, 4) for t in range(ROWS)], 0.3)
    caches = fixed([k, v])

    def compute(t: int, rows: Tensors) -> Tensors:
        return [OPS.sparse_attention(rows[0], *caches, start + t, 0.3, rows[1], 4)]

    return Case([q, lists], compute, [exact], [4e-6])


def select_blocks() -> Case:
    """Small integers: scores are exact in any order, and ties are common."""
    rng = np.random.default_rng(5)
    start, block, top = 100, 3, 20
    q = rng.integers(-3, 4, (ROWS, 3, 8)).astype(np.float32)
    key = rng.integers(-3, 4, ((start + ROWS) // block, 8)).astype(np.float32)
    score = np.maximum(np.einsum("tnd,bd->tnb", q, key), 0).sum(1)
    exact = np.full((ROWS, top), -1)
    for t in range(ROWS):
        picked = index.best_blocks(score[t, : (start + t + 1) // block], top)
        exact[t, : len(picked)] = picked
    keys = fixed(torch.from_numpy(key))
    return Case(
        [torch.from_numpy(q)],
        lambda t, rows: [OPS.select_blocks(rows[0], keys, start + t, block, top)],
        [exact], [0.0],
    )  # fmt: skip


def index_block_keys() -> Case:
    raw, weight, angle = random(ROWS, 4, 33), fixed(random(33, seed=1)), 50 * random(ROWS, 8, seed=2)
    cos, sin = angle.cos(), angle.sin()
    mean = f64(raw).mean(1)
    x = mean / np.sqrt((mean**2).mean(-1, keepdims=True) + 1e-6) * (1 + f64(weight))
    a, b, c, s = x[:, :8], x[:, 8:16], f64(cos), f64(sin)
    exact = np.concatenate([a * c - b * s, b * c + a * s, x[:, 16:]], 1)
    return Case(
        [raw, cos, sin], lambda _, rows: [OPS.index_block_keys(rows[0], weight, 1e-6, *rows[1:])], [exact], [1e-5]
    )


def router() -> Case:
    logits = 4 * random(ROWS, 37, seed=3)
    p = np.exp(f64(logits) - f64(logits).max(-1, keepdims=True))
    ids = np.argsort(-f64(logits), -1, kind="stable")[:, :5]
    weights = np.take_along_axis(p, ids, -1)
    weights /= weights.sum(-1, keepdims=True)
    return Case(
        [logits], lambda _, rows: list(OPS.router(rows[0], 5, renormalise=True)), [ids, weights], [0.0, 2e-6 * weights]
    )


def gates() -> Case:
    """silu_mul, sigmoid_mul with a gate an element and a gate a row, add."""
    gate, x = 6 * random(ROWS, 37), random(ROWS, 37, seed=5)
    one = 3 * random(ROWS, 1, seed=6)
    g, u = delta.sigmoid(f64(gate)), f64(x)
    exact = [f64(gate) * g * u, g * u, delta.sigmoid(f64(one)) * u, f64(gate) + u]

    def compute(_: int, rows: Tensors) -> Tensors:
        a, b, single = rows
        return [OPS.silu_mul(a, b), OPS.sigmoid_mul(a, b), OPS.sigmoid_mul(single, b), OPS.add(a, b)]

    return Case([gate, x, one], compute, exact, [4e-7 * np.abs(e) + 1e-30 for e in exact])


def argmax() -> Case:
    logits = random(ROWS, 70, seed=7).round()
    exact = np.argmax(logits.numpy(), -1)
    return Case([logits], lambda _, rows: [torch.tensor(OPS.argmax(rows[0]))], [exact], [0.0])


def swiglu() -> Case:
    gate, up = (Matrix("f32", random(7, 600, seed=s) / 25, 600) for s in (8, 9))
    down = Matrix("bf16", random(9, 7, seed=10).bfloat16(), 7)
    x = random(ROWS, 600)
    g, u = (f64(x) @ f64(m.data).T for m in (gate, up))
    exact = (g * delta.sigmoid(g) * u) @ f64(down.data).T
    placed = fixed([gate, up, down])
    return Case([x], lambda _, rows: [OPS.swiglu(rows[0], *placed)], [exact], [2e-5])


def hyper(kind: str) -> Case:
    """hyper_mix with injection, then hyper_add: two streams of 260, so that their mixer sums over more than a panel."""
    weights = streams.make_mixer(2, 260, 6, kind, inject=True)
    x, y = 2 * random(ROWS, 2, 260), random(ROWS, 260, seed=12)
    assert weights.inject is not None
    down, up, inject = (f64(m.data) for m in (weights.down, weights.up, weights.inject))
    n = streams.norm(f64(x), f64(weights.norm_SH), 1e-6)
    hidden = n.reshape(ROWS, -1) @ down.T / 2
    mix = delta.sigmoid((hidden * delta.sigmoid(hidden)) @ up.T).reshape(n.shape)
    c = 2 * delta.sigmoid(n.reshape(ROWS, -1) @ inject.T / 2)
    added = f64(x) + c[..., None] * f64(y)[:, None]
    placed = fixed(weights)

    def compute(_: int, rows: Tensors) -> Tensors:
        u, gate = OPS.hyper_mix(rows[0], placed)
        return [u, gate, OPS.hyper_add(rows[0], gate, rows[1])]

    return Case([x, y], compute, [(mix * n).mean(1), c, added], [1e-5, 5e-6, 3e-5])


def ngram_gate() -> Case:
    norms = [random(3, 45, seed=s) for s in (7, 8, 9)]
    key, value, x = random(ROWS, 3, 45), random(ROWS, 45, seed=10), random(ROWS, 3, 45, seed=11)
    k_norm, q_norm, conv = map(f64, norms)
    match = (streams.norm(f64(key), k_norm, 1e-6) * streams.norm(f64(x), q_norm, 1e-6)).sum(-1) / 45**0.5
    match = np.sign(match) * np.sqrt(np.maximum(np.abs(match), 1e-6))
    gated = delta.sigmoid(match)[..., None] * f64(value)[:, None]
    placed = NgramWeights(*fixed(norms), eps=1e-6)
    return Case(
        [key, value, x], lambda _, rows: list(OPS.ngram_gate(*rows, placed)),
        [gated, streams.norm(gated, conv, 1e-6)], [1e-4, 2e-4],
    )  # fmt: skip


def causal_conv(dilation: int) -> Case:
    weight = fixed(random(70, 4, seed=1))
    z = random(ROWS + 3 * dilation, 70)
    exact = delta.convolution(f64(z[3 * dilation :]), f64(z[: 3 * dilation]), f64(weight), dilation)
    tails = [fixed(z[t : t + 3 * dilation]) for t in range(ROWS)]

    def compute(t: int, rows: Tensors) -> Tensors:
        return [OPS.causal_conv(rows[0], tails[t], weight, dilation)]

    return Case([z[3 * dilation :]], compute, [exact], [4e-6])


def delta_inputs() -> Case:
    weights = delta.make_weights(2, 4, 12, 9)
    channels = weights.conv_CW.shape[0]
    z, b, a = random(ROWS + 3, channels, seed=6), 3 * random(ROWS, 4, seed=8), 8 * random(ROWS, 4, seed=9)
    mixed = delta.convolution(f64(z[3:]), f64(z[:3]), f64(weights.conv_CW), 1)
    q, k = (x.reshape(ROWS, 2, 12) for x in (mixed[:, :24], mixed[:, 24:48]))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    rate = np.logaddexp(0, f64(a) + f64(weights.dt_bias_N))
    g = -np.exp(f64(weights.log_decay_N)) * rate
    exact = [q * 12**-0.5, k, mixed[:, 48:].reshape(ROWS, 4, 9), delta.sigmoid(f64(b)), g]
    placed, tails = fixed(weights), [fixed(z[t : t + 3]) for t in range(ROWS)]

    def compute(t: int, rows: Tensors) -> Tensors:
        qs, found = OPS.delta_inputs(rows[0], tails[t], rows[1], rows[2], placed)
        return [qs, found.k_TGD, found.v_TNV, found.beta_TN, found.g_TN]

    return Case([z[3:], b, a], compute, exact, [2e-6, 5e-6, 6e-6, 2e-7, 2e-6 * np.abs(g) + 1e-30])


def gated_delta() -> Case:
    """A prompt from the state that the rows before left. That state is what single rows make of it, which
    test_every_row_count.py also holds against float64."""
    q, rows = delta.make_rows(ROWS, 2, 4, 12, 37, seed=10)
    parts = [q, rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN]
    start = random(4, 12, 37, seed=20)
    exact, _ = delta.recurrence(q, rows, start)
    states = [start]
    for t in range(ROWS):
        states.append(states[-1].clone())
        one = [x[t : t + 1] for x in parts]
        OPS.gated_delta(one[0], DeltaRows(*one[1:]), states[-1], None, write=True)
    room = Room(start.numel() * 4)

    def compute(t: int, cut: Tensors) -> Tensors:
        state = room.place(states[t])
        window = OPS.gated_delta(cut[0], DeltaRows(*cut[1:]), state, None, write=False)
        assert same_bits(state, states[t])
        o = OPS.gated_delta(cut[0], DeltaRows(*cut[1:]), state, None, write=True)
        assert same_bits(window, o)
        assert same_bits(state, states[t + len(o)])
        folded = room.place(states[t])
        if t + len(o) < ROWS:  # the same rows as a window's accepted ones: the next call folds them in
            after = [fixed(x[t + len(o) : t + len(o) + 1]) for x in parts]
            OPS.gated_delta(after[0], DeltaRows(*after[1:]), folded, DeltaRows(*cut[1:]), write=False)
            assert same_bits(folded, states[t + len(o)])
        return [o]

    return Case(parts, compute, [exact], [1e-5])


def gated_norm() -> Case:
    o, z, weight = 2 * random(ROWS, 3, 20, seed=40), 3 * random(ROWS, 3, 20, seed=41), random(20, seed=42)
    normed = f64(o) / np.sqrt((f64(o) ** 2).mean(-1, keepdims=True) + 1e-6) * f64(weight)
    placed = fixed(weight)
    return Case(
        [o, z], lambda _, rows: [OPS.gated_norm(*rows, placed, 1e-6, "silu")],
        [normed * delta.sigmoid(f64(z)) * f64(z)], [1e-5],
    )  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    **{f"linear {kind}": lambda kind=kind: linear(kind) for kind in FORMATS},
    **{f"linear {kind} of 33 columns": lambda kind=kind: linear(kind, 33, 5) for kind in FORMATS},
    **{f"embedding {kind}": lambda kind=kind: embedding(kind) for kind in FORMATS},
    "rms_norm": rms_norm,
    "rope": rope,
    "attention f32": lambda: attend(torch.float32),
    "attention bf16": lambda: attend(torch.bfloat16),
    "sparse_attention f32": lambda: sparse(torch.float32),
    "sparse_attention bf16": lambda: sparse(torch.bfloat16),
    "select_blocks": select_blocks,
    "index_block_keys": index_block_keys,
    "router": router,
    "gates": gates,
    "argmax": argmax,
    "swiglu": swiglu,
    "hyper f32": lambda: hyper("f32"),
    "hyper bf16": lambda: hyper("bf16"),
    "ngram_gate": ngram_gate,
    "causal_conv": lambda: causal_conv(1),
    "causal_conv dilated": lambda: causal_conv(3),
    "delta_inputs": delta_inputs,
    "gated_delta": gated_delta,
    "gated_norm": gated_norm,
}
