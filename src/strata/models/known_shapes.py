"""Published shapes by name, so that a plan or a synthetic benchmark needs no file.

Lives in ``models`` because only this room knows model names. The numbers are the released configurations'
own; only what the planner and the families read is kept.
"""

from __future__ import annotations

from typing import Any

from strata.errors import ConfigError

__all__ = ["BUILT_IN_SHAPE", "KNOWN_SHAPES", "PROBE_SHAPES", "known_config"]

_QWEN3_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "eos_token_id": [151645, 151643],
}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        **_QWEN3_COMMON,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "flash-next": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": {
            "model_type": "qwen4_exp_text",
            "hidden_act": "silu",
            "hidden_size": 2560,
            "vocab_size": 248320,
            "num_hidden_layers": 48,
            "layer_types": (["linear_attention"] * 3 + ["indexed_attention"]) * 12,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attention_bias": False,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "output_gate_type": "sigmoid",
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "hc_count": 4,
            "hc_lowrank": 320,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [2],
            "ple_embed_dim": 2560,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 8,
            "ngram_vocab_size_base": 20000000,
            "make_ngram_vocab_size_divisible_by": 128,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
            "eos_token_id": [248044, 248046],
        },
    },
    "qwen3-235b": {
        **_QWEN3_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
    },
}


# The built-in random model's: small enough that a few placements of a 2,048-token prompt take seconds on two cores.
# ``vocab_size`` is the byte tokenizer's, rounded up.
BUILT_IN_SHAPE: dict[str, Any] = {
    **_QWEN3_COMMON,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "vocab_size": 288,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": [258, 256],
}


# Models of a family with next to no arithmetic in a layer: a round of one measures what a layer costs beside it.
_PROBE_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
    "vocab_size": 288,
    "max_position_embeddings": 1024,
    "eos_token_id": [258, 256],
}
PROBE_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_QWEN3_COMMON, **_PROBE_SIZES},
    "qwen4_exp": {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        **_PROBE_SIZES,
        "output_gate_type": "sigmoid",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "hc_count": 4,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}


def known_config(name: str) -> dict[str, Any]:
    """The raw configuration of a known shape. ``ConfigError`` lists the names there are."""
    if name not in KNOWN_SHAPES:
        raise ConfigError(f"no known shape '{name}'", f"known shapes: {', '.join(KNOWN_SHAPES)}")
    return KNOWN_SHAPES[name]
