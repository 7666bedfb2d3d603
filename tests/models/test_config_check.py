"""Configs: the family is found by architecture, sizes are read in every notation, the rest is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from strata.errors import CheckpointError
from strata.models import find
from tests.models.oracle import tiny_qwen4_config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "eos_token_id": 7,
}


def qwen4(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = tiny_qwen4_config().to_dict()
    return {**raw, "architectures": ["Qwen4ExpForCausalLM"], **changes}


def read(raw: dict[str, Any]) -> Any:
    return find(raw).read_config(raw)


def test_unknown_architecture_names_what_is_read() -> None:
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM is not implemented.*Qwen3MoeForCausalLM"):
        find({"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("names", [None, [], "Qwen3MoeForCausalLM", [3]])
def test_missing_architectures_are_named(names: Any) -> None:
    with pytest.raises(CheckpointError, match="no list of architectures"):
        find({"architectures": names})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"model_type": "qwen2_moe"}, 'model_type is "qwen2_moe"'),
        ({"use_qk_norm": False}, "use_qk_norm is false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"norm_type": "layernorm"}, 'norm_type is "layernorm"'),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"num_key_value_heads": 3}, "4 query heads are no multiple of 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
        ({"num_experts": None}, "num_experts or num_local_experts is missing"),
    ],
)
def test_qwen3_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read({**QWEN3, **change})
    assert words in caught.value.message
    assert "\n" not in str(caught.value)


def test_qwen3_notations() -> None:
    assert read(QWEN3).head_width == 16
    assert read({**QWEN3, "rope_theta": 5e5}).rope_theta == 5e5
    assert read({**QWEN3, "rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5
    assert read({**QWEN3, "rope_parameters": {"rope_theta": 3e5, "rope_type": "default"}}).rope_theta == 3e5
    renamed = {**QWEN3, "num_local_experts": 8}
    del renamed["num_experts"]
    assert read(renamed).num_experts == 8
    assert read(QWEN3).eos_ids == (7,)
    assert read({**QWEN3, "eos_token_id": [1, 2]}).eos_ids == (1, 2)
    assert read({**QWEN3, "eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"output_gate_type": "tanh"}, 'output_gate_type is "tanh"'),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer kind sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "layer_types does not name"),
        ({"hc_count": 1}, "hc_count is 1"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
        ({"indexer_budget": None}, "indexer_budget is missing"),
        ({"indexer_budget": 18}, "indexer_budget 18 is no multiple of indexer_compress_ratio 4"),
        ({"indexer_head_dim": 8}, "16 rotary dimensions do not fit"),
        ({"linear_num_value_heads": 5}, "5 linear value heads are no multiple of 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"ple_layer_ids": [4]}, "must name linear attention layers"),
        ({"ple_layer_ids": [0]}, "must name linear attention layers"),
        ({"ple_embed_dim": 90}, "ple_embed_dim 90 is no multiple of 4"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"model_type": "qwen3_next"}, 'model_type is "qwen3_next"'),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope type 'yarn'"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"topk_method": "noaux_tc"}, 'topk_method is "noaux_tc"'),
    ],
)
def test_qwen4_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(qwen4(**change))
    assert words in caught.value.message
    assert "\n" not in str(caught.value)


def test_qwen4_layer_kinds_in_old_and_new_names() -> None:
    old = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    newer = [*old[:3], "qwen_sparse_attention"]
    newest = [*old[:3], "indexed_attention"]
    kinds = ("linear", "linear", "linear", "attention")
    assert read(qwen4(layer_types=old)).layer_kinds == kinds
    assert read(qwen4(layer_types=newer)).layer_kinds == kinds
    assert read(qwen4(layer_types=newest)).layer_kinds == kinds
    assert read(qwen4(layer_types=None)).layer_kinds == kinds
    assert read(qwen4(layer_types=None, full_attention_interval=2, ple_layer_ids=[1])).layer_kinds == (
        "linear",
        "attention",
        "linear",
        "attention",
    )


def test_qwen4_multimodal_config_is_its_text_part() -> None:
    raw = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": qwen4(norm_topk_prob=None),
        "tie_word_embeddings": True,
        "eos_token_id": [1, 2],
    }
    config = read(raw)
    assert config.multimodal
    assert config.tied
    assert config.renormalise
    assert config.eos_ids == (5, 6)
    assert config.ngram is not None
    assert config.ngram.boundary == 5


def test_released_sizes() -> None:
    """The numbers of the released model's facts sheet, from its configuration."""
    raw = qwen4(
        vocab_size=248320,
        hidden_size=2560,
        num_hidden_layers=48,
        layer_types=None,
        num_attention_heads=24,
        head_dim=256,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        num_experts=512,
        num_experts_per_tok=10,
        hc_lowrank=320,
        ple_embed_dim=2560,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        split_ngram_parts=512,
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        eos_token_id=[248044, 248046],
    )
    config = read(raw)
    table = find(raw).weight_map(config).entry("layers.1.ple.ple_embedding.ngram_embedding.weight")
    assert table.shape == (320_001_536, 160)
    assert config.delta_channels == 10_240
    assert config.rotary == 64
    assert config.index_top_blocks == 512
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == "attention"] == list(range(3, 48, 4))
    recurrent = 36 * 48 * 128 * 128 * 4
    per_token = config.state_bytes(4096, "bf16") - config.state_bytes(0, "bf16")
    assert per_token == 4096 * config.position_bytes("bf16")
    assert per_token == 4096 * 12 * (2 * 2 * 256 * 2 + 128 * 4 * 5 // 4)
    assert config.state_bytes(0, "bf16") == recurrent + 36 * 3 * 10_240 * 4 + 9 * 10_240 * 4


def test_config_reading_needs_no_torch() -> None:
    code = (
        "import sys; from strata.models import find; raw = eval(sys.argv[1]); family = find(raw);"
        "family.weight_map(family.read_config(raw)); assert 'torch' not in sys.modules"
    )
    for raw in (QWEN3, qwen4()):
        subprocess.run([sys.executable, "-c", code, repr(raw)], check=True)
