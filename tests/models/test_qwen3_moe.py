"""Qwen3-MoE against transformers in FP32: logits, chunk sizes, windows, greedy tokens, layouts."""

from __future__ import annotations

import pytest
import torch

from strata.errors import EngineError, RequestError
from strata.kernels.reference import ExpertWeights, ReferenceExperts, ReferenceOps
from tests.models.oracle import Pair, assert_greedy_agrees, sample_ids, tiny_qwen3, worst

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def pair() -> Pair:
    return tiny_qwen3()


@pytest.mark.parametrize("chunks", [[300], [7], [64], [131, 3, 100]])
def test_prompt_equals_oracle_in_any_chunks(pair: Pair, chunks: list[int]) -> None:
    ids = sample_ids(300)
    assert worst(pair.logits(ids, chunks), pair.oracle_logits(ids)) < TOLERANCE


@pytest.mark.parametrize("changes", [{"norm_topk_prob": False}, {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-2}])
def test_config_values_are_used(changes: dict[str, object]) -> None:
    other = tiny_qwen3(**changes)
    ids = sample_ids(40)
    assert worst(other.logits(ids), other.oracle_logits(ids)) < TOLERANCE


@pytest.mark.slow
def test_greedy_tokens_equal_oracle() -> None:
    assert assert_greedy_agrees(tiny_qwen3(num_hidden_layers=2), sample_ids(9, seed=4), 200) > 150


def test_rejected_rows_leave_no_trace(pair: Pair) -> None:
    ids = sample_ids(40)
    expected = pair.logits(ids)
    state = pair.model.new_state(60)
    with torch.no_grad():
        while state.length < len(ids):
            at = state.length
            window = [*ids[at : at + 2], 3, 9]
            found = pair.model.forward(ReferenceOps(), window, state, pair.experts)
            accepted = min(2, len(ids) - at)
            assert found is not None
            assert worst(found[:accepted], expected[at : at + accepted]) < TOLERANCE
            state.commit(accepted)


def test_last_and_none_logits(pair: Pair) -> None:
    ids = sample_ids(12)
    expected = pair.logits(ids)
    with torch.no_grad():
        last = pair.model.forward(ReferenceOps(), ids, pair.model.new_state(12), pair.experts, "last")
        assert last is not None
        assert last.shape == (1, 128)
        assert worst(last, expected[-1:]) < TOLERANCE
        assert pair.model.forward(ReferenceOps(), ids, pair.model.new_state(12), pair.experts, "none") is None


def test_bf16_cache_is_close_and_half_as_large(pair: Pair) -> None:
    smooth = tiny_qwen3(num_experts_per_tok=8)  # rounding cannot flip a router's choice where all are chosen
    ids = sample_ids(50)
    error = worst(smooth.logits(ids, kv="bf16"), smooth.logits(ids))
    assert TOLERANCE < error < 5e-2
    assert pair.model.new_state(50, "bf16").nbytes * 2 == pair.model.new_state(50).nbytes


@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_planned_state_bytes_are_the_allocated_ones(pair: Pair, kv: str) -> None:
    assert pair.model.config.state_bytes(77, kv) == pair.model.new_state(77, kv).nbytes  # type: ignore[arg-type]


def test_bf16_experts_equal_oracle_with_rounded_weights(pair: Pair) -> None:
    layers = {
        layer: ExpertWeights(block.mlp.experts.gate_up_proj.bfloat16(), block.mlp.experts.down_proj.bfloat16())
        for layer, block in enumerate(pair.oracle.model.layers)
    }
    rounded = tiny_qwen3()
    with torch.no_grad():
        for block in rounded.oracle.model.layers:
            block.mlp.experts.gate_up_proj.copy_(block.mlp.experts.gate_up_proj.bfloat16())
            block.mlp.experts.down_proj.copy_(block.mlp.experts.down_proj.bfloat16())
    ids = sample_ids(60)
    ours = Pair(rounded.oracle, pair.model, ReferenceExperts(layers))
    assert worst(ours.logits(ids), rounded.oracle_logits(ids)) < TOLERANCE


def test_context_is_a_hard_limit(pair: Pair) -> None:
    state = pair.model.new_state(8)
    with pytest.raises(RequestError, match=r"9 rows at position 0 do not fit a context of 8 positions"):
        pair.model.forward(ReferenceOps(), sample_ids(9), state, pair.experts)
    pair.model.forward(ReferenceOps(), sample_ids(8), state, pair.experts)
    state.commit(8)
    assert state.length == 8


def test_failed_prompt_chunk_poisons_its_state(pair: Pair) -> None:
    def broken(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise EngineError("no worker answered")

    state = pair.model.new_state(8)
    with pytest.raises(EngineError, match="no worker"):
        pair.model.forward(ReferenceOps(), [1, 2], state, broken, certain=True)
    with pytest.raises(EngineError, match="half advanced"):
        pair.model.forward(ReferenceOps(), [1, 2], state, pair.experts)


def test_failed_window_can_be_repeated(pair: Pair) -> None:
    def broken(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise EngineError("no worker answered")

    state = pair.model.new_state(8)
    with pytest.raises(EngineError, match="no worker"):
        pair.model.forward(ReferenceOps(), [1, 2], state, broken)
    found = pair.model.forward(ReferenceOps(), [1, 2], state, pair.experts)
    assert found is not None
    assert worst(found, pair.logits([1, 2])) == 0.0
