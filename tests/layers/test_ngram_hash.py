"""The n-gram hash against unlimited integers, and against the oracle's own module."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from strata.layers.ngram_hash import NgramHash
from tests.models.oracle import tiny_qwen4_config


def wrap(value: int) -> int:
    """Two's complement of 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def plain_rows(hashing: NgramHash, window: list[int]) -> list[list[int]]:
    before, found = hashing.order - 1, []
    for t in range(before, len(window)):
        tokens, restarted = [window[t]], False
        for shift in range(1, hashing.order):
            restarted = restarted or window[t - shift] == hashing.boundary
            tokens.append(hashing.boundary if restarted else window[t - shift])
        row = []
        for order in range(2, hashing.order + 1):
            mixed = 0
            for position in range(order):
                mixed ^= wrap(tokens[position] * hashing.multipliers[position])
            for head in range(hashing.heads):
                which = (order - 2) * hashing.heads + head
                row.append(wrap(mixed) % hashing.sizes[which] + hashing.offsets[which])
        found.append(row)
    return found


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 5, 5, 77, 248_319]), min_size=5, max_size=30),
    st.integers(2, 4),
    st.integers(0, 2),
)
def test_rows_equal_unlimited_integers(window: list[int], order: int, module: int) -> None:
    hashing = NgramHash(module, order, 3, 248_320, 1000, 1234, boundary=5)
    found = hashing.rows(window)
    assert found.dtype == np.int64
    assert found.tolist() == plain_rows(hashing, window)


def test_sizes_are_consecutive_primes_over_modules() -> None:
    primes = [n for n in range(50, 300) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    first, second = (NgramHash(module, 3, 4, 100, 50, 1, 0) for module in (0, 1))
    assert list(first.sizes + second.sizes) == primes[:16]
    assert first.offsets == tuple(sum(primes[:i]) for i in range(8))
    assert first.table_rows(128) % 128 == 0
    assert 0 <= first.table_rows(128) - sum(primes[:8]) < 128


def test_constants_equal_oracles() -> None:
    for module in (0, 1):
        config = tiny_qwen4_config(vocab_size=248_320, ple_layer_ids=[1, 2])
        oracle = Qwen4ExpTextNGramEmbedding(config, 96, module, module)
        hashing = NgramHash(module, 3, 2, 248_320, 100, 1234, 5)
        assert hashing.multipliers == tuple(oracle.layer_multipliers.tolist())
        assert list(hashing.sizes) == oracle.head_vocab_sizes
        assert list(hashing.offsets) == oracle.head_offsets
        assert hashing.table_rows(128) == oracle.ngram_embedding.weight.shape[0]


def test_rows_equal_oracles() -> None:
    config = tiny_qwen4_config(vocab_size=248_320)
    oracle = Qwen4ExpTextNGramEmbedding(config, 4, 1, 0)
    hashing = NgramHash(0, 3, 2, 248_320, 100, 1234, 5)
    oracle.ngram_embedding.weight.data = torch.arange(hashing.table_rows(128)).float()[:, None]
    ids = [248_319, 3, 5, 9, 5, 5, 1, 2, 3, 4, 5]
    found = hashing.rows([5, 5, *ids])
    assert found.tolist() == oracle(torch.tensor([ids]), None)[0].long().tolist()


def test_released_sizes_reach_the_published_table() -> None:
    hashing = NgramHash(0, 3, 8, 248_320, 20_000_000, 1234, 248_044)
    assert hashing.table_rows(128) == 320_001_536
    assert all(value % 2 == 1 for value in hashing.multipliers)
