"""Sizes of the trained model, and what its config.json says of them.

Lives beside the trainer's model, apart from it because packaging and tests need the numbers without the mathematics.
Knows nothing of training.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from strata.layers.ngram_hash import NgramHash

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """Sizes of the shipped model. ``hf_config`` is what config.json says."""

    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 8
    interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64
    rotary: float = 0.5
    theta: float = 10_000.0
    delta_key_heads: int = 4
    delta_value_heads: int = 4
    delta_width: int = 64
    conv: int = 4
    experts: int = 24
    top_k: int = 4
    expert_width: int = 96
    shared_width: int = 128
    streams: int = 4
    rank: int = 32
    ple_width: int = 128
    ngram_heads: int = 4
    ngram_base: int = 8192
    ngram_seed: int = 1234
    index_heads: int = 4
    index_width: int = 64
    index_block: int = 4
    index_budget: int = 512
    context: int = 4096
    eps: float = 1e-6
    eos: tuple[int, int] = (8179, 8181)
    extra: dict[str, int] = field(default_factory=dict)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    @property
    def ngram_hash(self) -> NgramHash:
        return NgramHash(0, 3, self.ngram_heads, self.vocabulary, self.ngram_base, self.ngram_seed, self.eos[0])

    def hf_config(self) -> dict[str, Any]:
        """The published layout of these sizes (text only: no vision weights are shipped)."""
        rotary = int(self.head_width * self.rotary)
        third = rotary // 6
        return {
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "model_type": "qwen4_exp",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            **self.extra,
            "text_config": {
                "model_type": "qwen4_exp_text",
                "hidden_act": "silu",
                "hidden_size": self.hidden,
                "vocab_size": self.vocabulary,
                "num_hidden_layers": self.layers,
                "layer_types": [
                    "indexed_attention" if self.is_attention(i) else "linear_attention" for i in range(self.layers)
                ],
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_width,
                "attention_bias": False,
                "linear_conv_kernel_dim": self.conv,
                "linear_key_head_dim": self.delta_width,
                "linear_value_head_dim": self.delta_width,
                "linear_num_key_heads": self.delta_key_heads,
                "linear_num_value_heads": self.delta_value_heads,
                "output_gate_type": "sigmoid",
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "norm_topk_prob": True,
                "moe_intermediate_size": self.expert_width,
                "shared_expert_intermediate_size": self.shared_width,
                "hc_count": self.streams,
                "hc_lowrank": self.rank,
                "indexer_n_heads": self.index_heads,
                "indexer_kv_heads": 1,
                "indexer_head_dim": self.index_width,
                "indexer_budget": self.index_budget,
                "indexer_compress_ratio": self.index_block,
                "ple_layer_ids": [2],
                "ple_embed_dim": self.ple_width,
                "ple_conv_kernel_size": self.conv,
                "ngram_size": 3,
                "heads_per_ngram": self.ngram_heads,
                "ngram_vocab_size_base": self.ngram_base,
                "make_ngram_vocab_size_divisible_by": 128,
                "split_ngram_parts": 1,
                "seed": self.ngram_seed,
                "rms_norm_eps": self.eps,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": self.theta,
                    "partial_rotary_factor": self.rotary,
                    "mrope_interleaved": True,
                    "mrope_section": [rotary // 2 - 2 * third, third, third],
                },
                "max_position_embeddings": self.context,
                "mtp_num_hidden_layers": 1,
                "tie_word_embeddings": False,
                "eos_token_id": list(self.eos),
                "pad_token_id": self.eos[0],
            },
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
