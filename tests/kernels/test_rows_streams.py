"""Native hyper-connections and n-gram gate against float64, and the law of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cpu import pool
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import HyperWeights, Matrix, NgramWeights
from tests.kernels.guard import Guarded
from tests.kernels.levels import on_every_level, same_bits

OPS: Any = Guarded(CpuOps())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(y: torch.Tensor, exact: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=0, atol=atol)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def matrix(rows: int, columns: int, kind: str, seed: int) -> Matrix:
    data = random(rows, columns, seed=seed) / columns**0.5
    return Matrix("f32", data, columns) if kind == "f32" else Matrix("bf16", data.bfloat16(), columns)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + weight)


def make_mixer(streams: int, columns: int, low: int, kind: str, *, inject: bool) -> HyperWeights:
    return HyperWeights(
        norm_SH=random(streams, columns, seed=1),
        down=matrix(low, streams * columns, kind, 2),
        up=matrix(streams * columns, low, kind, 3),
        inject=matrix(streams, streams * columns, kind, 4) if inject else None,
        eps=1e-6,
    )


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("streams", "columns", "low"), [(4, 64, 16), (1, 8, 3), (3, 45, 33), (2, 640, 80)])
def test_hyper_mix(kind: str, streams: int, columns: int, low: int) -> None:
    weights = make_mixer(streams, columns, low, kind, inject=True)
    x = 2 * random(9, streams, columns)
    assert weights.inject is not None

    def compute(first: int = 0, last: int = 9) -> list[torch.Tensor]:
        u, c = OPS.hyper_mix(x[first:last], weights)
        assert c is not None
        return [u, c]

    u, c = on_every_level(compute)
    for size in range(1, 9):
        parts = [compute(t, min(t + size, 9)) for t in range(0, 9, size)]
        assert same_bits(torch.cat([p[0] for p in parts]), u)
        assert same_bits(torch.cat([p[1] for p in parts]), c)

    down, up, inject = (m.data.double().numpy() for m in (weights.down, weights.up, weights.inject))
    n = norm(x.double().numpy(), weights.norm_SH.double().numpy(), 1e-6)
    flat = n.reshape(9, -1)
    hidden = flat @ down.T / streams
    mix = sigmoid((hidden * sigmoid(hidden)) @ up.T).reshape(n.shape)
    close(u, (mix * n).mean(1), 4e-6)
    close(c, 2 * sigmoid(flat @ inject.T / streams), 4e-6)


def test_the_last_mixer_has_no_injection() -> None:
    u, c = OPS.hyper_mix(random(3, 4, 32), make_mixer(4, 32, 8, "f32", inject=False))
    assert c is None
    with_it, _ = OPS.hyper_mix(random(3, 4, 32), make_mixer(4, 32, 8, "f32", inject=True))
    assert same_bits(u, with_it)


@pytest.mark.parametrize("columns", [1, 30, 640])
def test_hyper_add(columns: int) -> None:
    x, c, y = random(9, 4, columns), random(9, 4, seed=5), random(9, columns, seed=6)
    (out,) = on_every_level(lambda: [OPS.hyper_add(x, c, y)])
    close(out, x.double().numpy() + c.double().numpy()[..., None] * y.double().numpy()[:, None], 1e-6)
    assert same_bits(torch.cat([OPS.hyper_add(x[t : t + 1], c[t : t + 1], y[t : t + 1]) for t in range(9)]), out)


@pytest.mark.parametrize(("streams", "columns"), [(4, 64), (1, 5), (3, 45)])
def test_ngram_gate(streams: int, columns: int) -> None:
    norms = [random(streams, columns, seed=s) for s in (7, 8, 9)]
    weights = NgramWeights(*norms, eps=1e-6)
    key, value, x = random(9, streams, columns), random(9, columns, seed=10), random(9, streams, columns, seed=11)
    key[4] = 0.0  # the gate's sum is exactly zero: sign 0, gate 1/2
    key[5] = -x[5] * (1 + norms[1]) / (1 + norms[0])

    def compute(first: int = 0, last: int = 9) -> list[torch.Tensor]:
        return list(OPS.ngram_gate(key[first:last], value[first:last], x[first:last], weights))

    gated, normed = on_every_level(compute)
    singles = [compute(t, t + 1) for t in range(9)]
    assert same_bits(torch.cat([s[0] for s in singles]), gated)
    assert same_bits(torch.cat([s[1] for s in singles]), normed)

    key64, value64, x64, k_norm, q_norm, conv = (t.double().numpy() for t in (key, value, x, *norms))
    match = (norm(key64, k_norm, 1e-6) * norm(x64, q_norm, 1e-6)).sum(-1) / columns**0.5
    match = np.sign(match) * np.sqrt(np.maximum(np.abs(match), 1e-6))
    exact = sigmoid(match)[..., None] * value64[:, None]
    close(gated, exact, 5e-6)
    close(normed, norm(exact, conv, 1e-6), 2e-5)
    assert same_bits(gated[4], (0.5 * value[4]).expand(streams, columns).contiguous())


def test_threads_change_nothing() -> None:
    weights = make_mixer(4, 320, 64, "bf16", inject=True)
    x, y = random(40, 4, 320), random(40, 320, seed=12)
    results = []
    for threads in (1, 2, 3):
        pool.configure(threads)
        u, c = OPS.hyper_mix(x, weights)
        assert c is not None
        results.append([u, c, OPS.hyper_add(x, c, y)])
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))


def test_shapes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(EngineError, match="hyper_mix"):
        OPS.hyper_mix(random(3, 4, 33), make_mixer(4, 32, 8, "f32", inject=False))
    with pytest.raises(EngineError, match="hyper_add"):
        OPS.hyper_add(random(3, 4, 32), random(3, 3), random(3, 32))
    with pytest.raises(EngineError, match="ngram_gate"):
        OPS.ngram_gate(random(3, 4, 8), random(3, 9), random(3, 4, 8), NgramWeights(*[random(4, 8)] * 3, eps=1e-6))


def test_a_long_chunk_gives_the_bits_of_its_windows() -> None:
    weights = make_mixer(2, 24, 6, "f32", inject=True)
    x = random(600, 2, 24)
    u, c = OPS.hyper_mix(x, weights)
    assert c is not None
    for t in (0, 250, 511, 595):
        few_u, few_c = OPS.hyper_mix(x[t : t + 5], weights)
        assert few_c is not None
        assert same_bits(few_u, u[t : t + 5])
        assert same_bits(few_c, c[t : t + 5])
