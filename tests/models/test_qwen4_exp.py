"""Qwen4-Exp against transformers in FP32: logits, chunk sizes, windows, greedy tokens, sparse attention, n-grams."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from strata.kernels.ops import DeltaRows
from strata.kernels.reference import ReferenceOps
from tests.models.oracle import (
    Pair,
    assert_greedy_agrees,
    defined_ties,
    sample_ids,
    tiny_qwen4,
    worst,
)

TOLERANCE = 2e-5


def prompt_with_boundaries(count: int) -> list[int]:
    """EOS ids alone, in a row, two apart, and the second stop id, which is no boundary."""
    ids = sample_ids(count)
    for position, token in ((10, 5), (11, 7), (50, 5), (51, 5), (60, 5), (62, 5), (70, 6), (128, 5)):
        if position < count:
            ids[position] = token
    return ids


@pytest.fixture(scope="module")
def pair() -> Pair:
    return tiny_qwen4()


@pytest.fixture(scope="module")
def expected(pair: Pair) -> torch.Tensor:
    with defined_ties():
        return pair.oracle_logits(prompt_with_boundaries(300))


@pytest.mark.parametrize("chunks", [[300], [64], [17], [9, 5], [131, 3, 100]])
def test_prompt_equals_oracle_in_any_chunks(pair: Pair, expected: torch.Tensor, chunks: list[int]) -> None:
    assert worst(pair.logits(prompt_with_boundaries(300), chunks), expected) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 19, 20, 23])
def test_short_prompts_equal_oracle(pair: Pair, expected: torch.Tensor, length: int) -> None:
    """Causality makes the oracle's first rows its answer to every shorter prompt."""
    found = pair.logits(prompt_with_boundaries(300)[:length], [1] if length < 9 else [length])
    assert worst(found, expected[:length]) < TOLERANCE


def test_attention_is_really_sparse(pair: Pair, expected: torch.Tensor) -> None:
    """A budget that covers the prompt gives other logits, from the first row with a fifth complete block on."""
    dense = tiny_qwen4(indexer_budget=512)
    ids = prompt_with_boundaries(300)
    difference = (dense.logits(ids) - expected).abs().amax(-1) / expected.abs().max()
    assert difference[:19].max() < TOLERANCE
    assert difference[19:].max() > 1e-2


def test_each_n_gram_boundary_matters(pair: Pair, expected: torch.Tensor) -> None:
    moved = tiny_qwen4(eos_token_id=[6, 5])
    ids = prompt_with_boundaries(300)
    difference = (moved.logits(ids) - expected).abs().amax(-1) / expected.abs().max()
    assert difference[:11].max() > 1e-3  # the fill before the start is the boundary id itself
    with defined_ties():
        assert worst(moved.logits(ids), moved.oracle_logits(ids)) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"output_gate_type": None},
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True},
        {"ple_layer_ids": None},
        {"ple_layer_ids": [1, 3], "ple_conv_kernel_size": 3},
        {"ngram_size": 4, "ple_embed_dim": 72, "heads_per_ngram": 3},
        {"hc_count": 2, "rms_norm_eps": 1e-2},
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        {"indexer_compress_ratio": 3, "indexer_budget": 12, "linear_conv_kernel_dim": 3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ],
)
def test_config_values_are_used(changes: dict[str, object]) -> None:
    other = tiny_qwen4(**changes)
    ids = prompt_with_boundaries(75)
    with defined_ties():
        assert worst(other.logits(ids, [40, 20]), other.oracle_logits(ids)) < TOLERANCE


@pytest.mark.slow
def test_greedy_tokens_equal_oracle() -> None:
    """One layer of each kind, n-grams at the first: 230 positions, 57 index blocks of which 4 are attended."""
    kinds = ["linear_attention", "indexed_attention"]
    pair = tiny_qwen4(num_hidden_layers=2, layer_types=kinds, ple_layer_ids=[1])
    with defined_ties():
        assert assert_greedy_agrees(pair, prompt_with_boundaries(30), 200) > 150


def test_windows_with_partial_commit_equal_plain_decoding(pair: Pair) -> None:
    """Windows of 1..4 rows whose tail is wrong, any number accepted, between prompt chunks and single rows."""
    ids = prompt_with_boundaries(120)
    expected = pair.logits(ids)
    state, choose, ops = pair.model.new_state(124), random.Random(5), ReferenceOps()
    with torch.no_grad():
        pair.model.forward(ops, ids[:21], state, pair.experts, "none", certain=True)
        state.commit(21)
        while state.length < len(ids):
            at, right, wrong = state.length, choose.randint(0, 3), choose.randint(0, 2)
            window = [*ids[at : at + right], *(choose.randrange(128) for _ in range(wrong))]
            if not window:
                continue
            found = pair.model.forward(ops, window, state, pair.experts)
            assert found is not None
            accepted = min(right, len(ids) - at)
            if accepted:
                assert worst(found[:accepted], expected[at : at + accepted]) < TOLERANCE
            state.commit(accepted)


def test_folding_is_the_same_recurrence(pair: Pair) -> None:
    """After windows of one and after windows of three the matrix state holds the same bits."""
    ids = prompt_with_boundaries(24)
    states = []
    for size in (1, 3):
        rows = _recorded_rows(pair, ids)
        matrix = torch.zeros(6, 16, 8)
        pending: DeltaRows | None = None
        for first in range(0, len(ids), size):
            cut = _cut(rows, first, first + size)
            ReferenceOps().gated_delta(torch.zeros(size, 2, 16), cut, matrix, pending, write=False)
            pending = cut
        states.append(matrix)
    one = _cut(_recorded_rows(pair, ids), 21, 24)
    for row in range(2):  # windows of one have folded 23 rows, windows of three 21
        ReferenceOps().gated_delta(
            torch.zeros(1, 2, 16), _cut(one, 0, 1), states[1], _cut(one, row, row + 1), write=False
        )
    assert torch.equal(states[0], states[1])


def _recorded_rows(pair: Pair, ids: list[int]) -> DeltaRows:
    generator = torch.Generator().manual_seed(len(ids))
    k = torch.nn.functional.normalize(torch.randn(len(ids), 2, 16, generator=generator), dim=-1)
    v = torch.randn(len(ids), 6, 8, generator=generator)
    beta, g = torch.rand(2, len(ids), 6, generator=generator)
    return DeltaRows(k, v, beta, -g)


def _cut(rows: DeltaRows, first: int, last: int) -> DeltaRows:
    return DeltaRows(rows.k_TGD[first:last], rows.v_TNV[first:last], rows.beta_TN[first:last], rows.g_TN[first:last])


def test_checkpoint_takes_a_sequence_back(pair: Pair) -> None:
    ids = prompt_with_boundaries(60)
    expected = pair.logits(ids)
    state, ops = pair.model.new_state(80), ReferenceOps()
    with torch.no_grad():
        for part in (ids[:29], ids[29:30]):
            pair.model.forward(ops, part, state, pair.experts, "none", certain=len(part) > 1)
            state.commit(len(part))
        saved = state.checkpoint()
        for token in (3, 9, 5):
            pair.model.forward(ops, [token, 1], state, pair.experts, "none")
            state.commit(2)
        state.rewind(saved)
        found = pair.model.forward(ops, ids[30:], state, pair.experts, certain=True)
    assert found is not None
    assert worst(found, expected[30:]) < TOLERANCE


def test_forward_without_commit_changes_nothing(pair: Pair) -> None:
    ids = prompt_with_boundaries(30)
    state, ops = pair.model.new_state(40), ReferenceOps()
    with torch.no_grad():
        pair.model.forward(ops, ids[:20], state, pair.experts, "none")
        state.commit(20)
        first = pair.model.forward(ops, ids[20:], state, pair.experts)
        pair.model.forward(ops, [1, 2, 3], state, pair.experts)
        again = pair.model.forward(ops, ids[20:], state, pair.experts)
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_planned_state_bytes_are_the_allocated_ones(pair: Pair, kv: str) -> None:
    assert pair.model.config.state_bytes(77, kv) == pair.model.new_state(77, kv).nbytes  # type: ignore[arg-type]


def test_state_does_not_alias_the_model(pair: Pair) -> None:
    """Two sequences interleaved on one model each equal their solo run."""
    one, two = prompt_with_boundaries(40), sample_ids(40, seed=9)
    alone = [pair.logits(one), pair.logits(two)]
    states, found = [pair.model.new_state(40) for _ in range(2)], [[], []]  # type: ignore[var-annotated]
    with torch.no_grad():
        for first in range(0, 40, 8):
            for which, ids in enumerate((one, two)):
                rows = pair.model.forward(ReferenceOps(), ids[first : first + 8], states[which], pair.experts)
                found[which].append(copy.copy(rows))
                states[which].commit(8)
    for which in range(2):
        assert worst(torch.cat(found[which]), alone[which]) < TOLERANCE
