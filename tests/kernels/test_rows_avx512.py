"""Every row operation on AVX-512 gives the bits of the scalar level and of AVX2: the tests that need the hardware.

The other rows tests compare all levels that the processor has; these say by name that AVX-512 was among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from strata.kernels.cpu import library
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import DeltaWeights, HyperWeights, Matrix, NgramWeights
from tests.kernels.guard import Guarded

pytestmark = pytest.mark.avx512
OPS: Any = Guarded(CpuOps())


def assert_same(compute: Callable[[], list[torch.Tensor]]) -> None:
    results = []
    for level in ("scalar", "avx2", "avx512"):
        library.select_isa(level)
        results.append(compute())
    for result in results[1:]:
        for first, other in zip(results[0], result, strict=True):
            assert first.shape == other.shape
            assert torch.equal(first.view(torch.int32), other.view(torch.int32))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(rows: int, columns: int) -> list[Matrix]:
    w, blocks = random(rows, columns, seed=1), -(-columns // 32)
    codes = torch.randint(-128, 128, (rows, blocks * 32), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    codes[:, columns:] = 0
    return [
        Matrix("f32", w, columns),
        Matrix("bf16", w.bfloat16(), columns),
        Matrix("q8_0", codes, columns, random(rows, blocks, seed=3).half()),
    ]


@pytest.mark.parametrize("columns", [1, 16, 33, 100, 512, 1041])
def test_products_and_embedding(columns: int) -> None:
    for rows in (*range(1, 14), 40, 101):
        x = random(rows, columns, seed=rows)
        assert_same(lambda x=x: [OPS.linear(x, matrix) for matrix in matrices(27, columns)])
    assert_same(lambda: [OPS.embedding([3, 26, 0], matrix) for matrix in matrices(27, columns)])


@pytest.mark.parametrize("columns", [1, 15, 16, 40, 131])
def test_pointwise(columns: int) -> None:
    x, y, gate = 4 * random(5, columns), random(5, columns, seed=1), random(5, 1, seed=2)
    top = min(columns, 6)

    def compute() -> list[torch.Tensor]:
        ids, weights = OPS.router(x, top, renormalise=True)
        pairs = [OPS.silu_mul(x, y), OPS.sigmoid_mul(x, y), OPS.sigmoid_mul(gate, y), OPS.add(x, y)]
        norms = [OPS.rms_norm(x, y[0], 1e-6, plus_one=True), OPS.gated_norm(x, y, y[0], 1e-6, "silu")]
        return [ids, weights, torch.tensor(OPS.argmax(x), dtype=torch.int32), *pairs, *norms]

    assert_same(compute)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 20), (8, 1, 128), (24, 2, 256), (3, 3, 8)])
def test_attention_and_index(kind: torch.dtype, heads: int, groups: int, width: int) -> None:
    q, k, v = random(7, heads, width), *(random(1300, groups, width, seed=s).to(kind) for s in (1, 2))
    keys, cos, sin = random(325, width, seed=3), random(7, width // 2, seed=4), random(7, width // 2, seed=5)

    def compute() -> list[torch.Tensor]:
        lists = OPS.select_blocks(q[:, :4], keys, 1290, 4, 70)
        keyed = OPS.index_block_keys(q[:, :4], cos.new_ones(width), 1e-6, cos, sin)
        sparse = OPS.sparse_attention(q, k, v, 1290, 0.1, lists, 4)
        return [lists, keyed, sparse, OPS.attention(q, k, v, 1290, 0.1), OPS.rope(q, cos, sin)]

    assert_same(compute)


@pytest.mark.parametrize(("keys", "heads", "key_width", "width"), [(2, 4, 128, 128), (1, 3, 33, 70), (1, 1, 8, 5)])
def test_delta_net(keys: int, heads: int, key_width: int, width: int) -> None:
    channels = 2 * keys * key_width + heads * width
    weights = DeltaWeights(
        random(channels, 4), random(heads, seed=1), random(heads, seed=2), keys, heads, key_width, width
    )
    qkv, tail, b, a = (
        random(n, c, seed=s) for n, c, s in ((9, channels, 3), (3, channels, 4), (9, heads, 5), (9, heads, 6))
    )

    def compute() -> list[torch.Tensor]:
        state = random(heads, key_width, width, seed=7)
        q, rows = OPS.delta_inputs(qkv, tail, b, a, weights)
        window = OPS.gated_delta(q, rows, state, rows.first(2), write=False)
        prompt = OPS.gated_delta(q, rows, state, None, write=True)
        return [q, rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN, window, prompt, state]

    assert_same(compute)


@pytest.mark.parametrize(("streams", "columns"), [(4, 64), (3, 45), (1, 7)])
def test_streams(streams: int, columns: int) -> None:
    down, up, inject = (
        Matrix("f32", random(rows, width, seed=s), width)
        for rows, width, s in ((12, streams * columns, 1), (streams * columns, 12, 2), (streams, streams * columns, 3))
    )
    mixer = HyperWeights(random(streams, columns, seed=4), down, up, inject, 1e-6)
    ngram = NgramWeights(*(random(streams, columns, seed=s) for s in (5, 6, 7)), eps=1e-6)
    x, key, value = random(6, streams, columns), random(6, streams, columns, seed=8), random(6, columns, seed=9)

    def compute() -> list[torch.Tensor]:
        u, c = OPS.hyper_mix(x, mixer)
        assert c is not None
        return [u, c, OPS.hyper_add(x, c, value), *OPS.ngram_gate(key, value, x, ngram)]

    assert_same(compute)
