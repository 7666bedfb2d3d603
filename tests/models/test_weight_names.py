"""Weight maps against what transformers really writes: every tensor of a saved checkpoint has exactly one entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
)

from strata.checkpoint.weight_map import ExpertSource
from strata.errors import CheckpointError
from strata.kernels.reference import ReferenceExperts
from strata.models import find
from tests.models.oracle import Pair, defined_ties, load_weights, randomise, sample_ids, tiny_qwen4_config, worst

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def saved(oracle: Any, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    oracle.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    raw = oracle.config.to_dict() | {"architectures": [type(oracle).__name__]}
    return raw, tensors


def read_back(oracle: Any, folder: Path) -> Pair:
    raw, tensors = saved(oracle, folder)
    family = find(raw)
    config = family.read_config(raw)
    dense, experts = load_weights(family.weight_map(config), tensors)
    return Pair(oracle.eval(), family.build(config, dense), ReferenceExperts(experts))


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_checkpoint(tmp_path: Path, tied: bool) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(
        vocab_size=64, moe_intermediate_size=32, num_experts=4, head_dim=16, num_experts_per_tok=2,
        tie_word_embeddings=tied, **sizes,
    )  # fmt: skip
    pair = read_back(randomise(Qwen3MoeForCausalLM(config), 2), tmp_path)
    ids = sample_ids(20, vocabulary=64)
    assert worst(pair.logits(ids), pair.oracle_logits(ids)) < 2e-5


def test_qwen4_text_checkpoint_with_table_in_parts(tmp_path: Path) -> None:
    pair = read_back(randomise(Qwen4ExpForCausalLM(tiny_qwen4_config()), 2), tmp_path)
    ids = sample_ids(40)
    with defined_ties():
        assert worst(pair.logits(ids), pair.oracle_logits(ids)) < 2e-5


def test_qwen4_multimodal_checkpoint(tmp_path: Path) -> None:
    config = Qwen4ExpConfig(text_config=tiny_qwen4_config().to_dict(), vision_config=VISION)
    pair = read_back(randomise(Qwen4ExpForConditionalGeneration(config), 2), tmp_path)
    ids = sample_ids(40)
    with defined_ties():
        assert worst(pair.logits(ids), pair.oracle_logits(ids)) < 2e-5


def test_another_hash_is_refused(tmp_path: Path) -> None:
    raw, tensors = saved(Qwen4ExpForCausalLM(tiny_qwen4_config()), tmp_path)
    family = find(raw)
    config = family.read_config(raw | {"seed": 99})
    dense, _ = load_weights(family.weight_map(config), tensors)
    with pytest.raises(CheckpointError, match="layer_multipliers"):
        family.build(config, dense)


def test_absent_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    raw, tensors = saved(Qwen4ExpForCausalLM(tiny_qwen4_config()), tmp_path)
    family = find(raw)
    config = family.read_config(raw)
    dense, _ = load_weights(family.weight_map(config), tensors)
    without = {name: weight for name, weight in dense.items() if name != "layers.2.linear_attn.dt_bias"}
    with pytest.raises(CheckpointError, match=r"layers\.2\.linear_attn\.dt_bias was not loaded"):
        family.build(config, without)
    dense["layers.3.self_attn.q_proj.weight"] = torch.zeros(256, 32)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is 256 x 32, 256 x 64 is expected"):
        family.build(config, dense)


def test_canonical_names_and_sources_are_unique() -> None:
    raw = tiny_qwen4_config().to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]}
    wanted = find(raw).weight_map(find(raw).read_config(raw))
    names = [entry.name for entry in wanted.dense]
    assert len(set(names)) == len(names)
    sources = [(name, entry.columns) for entry in wanted.dense for alternative in entry.sources for name in alternative]
    assert len(set(sources)) == len(sources)
    assert [entry.layer for entry in wanted.experts] == [0, 1, 2, 3, 4]
    assert wanted.experts[4].group == "mtp"
    layouts = {(source.packed, source.gate_up is not None) for source in wanted.experts[0].sources}
    assert layouts == {(False, False), (False, True), (True, False), (True, True)}
    assert all(isinstance(source, ExpertSource) for source in wanted.experts[0].sources)
