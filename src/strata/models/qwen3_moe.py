"""Qwen3-MoE: config check, weight names, block order.

Lives in ``models``; the mathematics is in ``layers``. It must not know tiers, backends or files. Importing it does
not import torch (configs are read without): ``build`` does.
Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.checkpoint.weight_map import ExpertEntry, WeightEntry, WeightMap, WeightRole
from strata.models.config_reader import MAX_EPS, MAX_LAYERS, MAX_THETA, ConfigReader
from strata.models.expert_sources import expert_sources
from strata.models.round_sizes import chunk_expert_bytes, cut_values, expert_values

if TYPE_CHECKING:
    from strata.kvcache.attention_cache import KvFormat
    from strata.models.family import Weights
    from strata.models.qwen3_moe_model import Qwen3Moe

__all__ = ["Qwen3MoeConfig", "build", "read_config", "weight_map"]


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """See ``FamilyConfig``."""

    vocabulary: int
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    head_width: int
    num_experts: int
    top_k: int
    renormalise: bool
    expert_intermediate: int
    eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    eos_ids: tuple[int, ...]
    family: str = "qwen3_moe"

    def position_bytes(self, kv: KvFormat) -> int:
        return self.num_layers * 2 * self.kv_heads * self.head_width * (4 if kv == "f32" else 2)

    def state_bytes(self, max_positions: int, kv: KvFormat) -> int:
        return max_positions * self.position_bytes(kv)

    def round_bytes(self, max_positions: int, window: int) -> int:
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        layer = 7 * self.hidden + 3 * q + 5 * kv + self.num_experts
        row = self.num_layers * layer + 2 * self.hidden + self.vocabulary
        row += expert_values(self.hidden, self.expert_intermediate, self.top_k)
        row += cut_values(self.heads, self.head_width, max_positions)
        return 4 * (window * row + max_positions * self.head_width)

    def chunk_bytes(self) -> int:
        return 16 * self.hidden + chunk_expert_bytes(self.hidden, self.expert_intermediate, self.top_k)

    def frame_bytes(self, max_positions: int, rows: int) -> int:
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        row = 4 * (4 * self.hidden + 6 * q + 6 * kv + 2 * self.num_experts)
        return rows * row + (max_positions + rows) * 8 * kv

    def gathered_bytes(self, window: int) -> int:
        return 0

    def mixing_work(self, positions: int) -> int:
        return self.num_layers * 2 * self.heads * self.head_width * positions


def read_config(raw: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Raises ``CheckpointError`` for anything that is not implemented."""
    reader = ConfigReader(raw)
    reader.require("model_type", "qwen3_moe")
    reader.refuse_foreign_arithmetic()
    reader.require("use_qk_norm", True)
    reader.require("n_shared_experts", 0)
    reader.require("shared_expert_intermediate_size", 0)
    rope = reader.rope()
    rope.require("partial_rotary_factor", 1.0)
    heads, kv_heads = reader.integer("num_attention_heads"), reader.integer("num_key_value_heads")
    hidden, num_experts = reader.integer("hidden_size"), reader.integer("num_experts", "num_local_experts")
    head_width = reader.integer("head_dim", default=hidden // heads)
    top_k = reader.integer("num_experts_per_tok")
    if heads % kv_heads:
        raise reader.refusal(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    if head_width % 2:
        raise reader.refusal(f"head_dim {head_width} is odd, rotary positions need an even width")
    if top_k > num_experts:
        raise reader.refusal(f"num_experts_per_tok {top_k} is more than num_experts {num_experts}")
    return Qwen3MoeConfig(
        vocabulary=reader.integer("vocab_size"),
        hidden=hidden,
        num_layers=reader.integer("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        num_experts=num_experts,
        top_k=top_k,
        renormalise=reader.flag("norm_topk_prob", default=False),
        expert_intermediate=reader.integer("moe_intermediate_size"),
        eps=reader.number("rms_norm_eps", default=1e-6, most=MAX_EPS),
        rope_theta=rope.number("rope_theta", default=10000.0, most=MAX_THETA),
        max_positions=reader.integer("max_position_embeddings"),
        tied=reader.flag("tie_word_embeddings", default=False),
        eos_ids=reader.ids("eos_token_id"),
    )


def weight_map(config: Qwen3MoeConfig) -> WeightMap:
    """Canonical names are the published ones without ``model.``."""

    def matrix(name: str, rows: int, columns: int, role: WeightRole = "dense") -> WeightEntry:
        return WeightEntry(name, (rows, columns), "matrix", role, ((f"model.{name}",),))

    def norm(name: str, size: int) -> WeightEntry:
        return WeightEntry(name, (size,), "vector", "norm", ((f"model.{name}",),))

    hidden, q, kv = config.hidden, config.heads * config.head_width, config.kv_heads * config.head_width
    head_source = (("lm_head.weight",),)
    tied_to = "embed_tokens.weight" if config.tied else None
    dense = [
        matrix("embed_tokens.weight", config.vocabulary, hidden, "embedding"),
        norm("norm.weight", hidden),
        WeightEntry("lm_head.weight", (config.vocabulary, hidden), "matrix", "head", head_source, tied_to=tied_to),
    ]
    experts = []
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        dense += [
            norm(at + "input_layernorm.weight", hidden),
            matrix(at + "self_attn.q_proj.weight", q, hidden),
            matrix(at + "self_attn.k_proj.weight", kv, hidden),
            matrix(at + "self_attn.v_proj.weight", kv, hidden),
            matrix(at + "self_attn.o_proj.weight", hidden, q),
            norm(at + "self_attn.q_norm.weight", config.head_width),
            norm(at + "self_attn.k_norm.weight", config.head_width),
            norm(at + "post_attention_layernorm.weight", hidden),
            matrix(at + "mlp.gate.weight", config.num_experts, hidden, "router"),
        ]
        sources = expert_sources((f"model.{at}mlp.experts.",))
        experts.append(ExpertEntry(layer, config.num_experts, hidden, config.expert_intermediate, sources))
    return WeightMap(tuple(dense), tuple(experts))


def build(config: Qwen3MoeConfig, weights: Weights) -> Qwen3Moe:
    """A model over borrowed weights. Raises ``CheckpointError`` when one is absent or of another shape."""
    from strata.models.qwen3_moe_model import Qwen3Moe

    return Qwen3Moe(config, weights)
