"""Qwen3-MoE's blocks in order, built from weights.

Lives in ``models`` beside ``qwen3_moe``, apart from it because this half needs torch. It must not know tiers,
backends or files. Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from strata.kernels.ops import ExpertExecutor, Ops
from strata.kvcache.attention_cache import AttentionCache, KvFormat
from strata.kvcache.parts import AttentionPart, StateParts
from strata.kvcache.sequence_state import SequenceState
from strata.kvcache.training_state import PassingCache, TrainingState
from strata.layers.attention import Attention
from strata.layers.moe import MixtureOfExperts
from strata.layers.rope import RopeTable
from strata.layers.rows import Rows, take_rows, wanted_rows
from strata.models.weight_view import WeightView

if TYPE_CHECKING:
    from strata.models.family import LogitRows, Weights
    from strata.models.qwen3_moe import Qwen3MoeConfig

__all__ = ["Qwen3Moe"]


@dataclass(frozen=True, eq=False)
class _Block:
    attention_norm_H: torch.Tensor
    attention: Attention
    experts_norm_H: torch.Tensor
    moe: MixtureOfExperts
    eps: float

    def forward(
        self, ops: Ops, x_TH: torch.Tensor, rows: Rows, cache: AttentionPart, experts: ExpertExecutor
    ) -> torch.Tensor:
        normed = ops.rms_norm(x_TH, self.attention_norm_H, self.eps)
        x_TH = ops.add(x_TH, self.attention.forward(ops, normed, rows, cache))
        normed = ops.rms_norm(x_TH, self.experts_norm_H, self.eps)
        return ops.add(x_TH, self.moe.forward(ops, normed, experts))


class Qwen3Moe:
    """See ``Model``."""

    def __init__(self, config: Qwen3MoeConfig, weights: Weights) -> None:
        view = WeightView(weights)
        self.config = config
        self._embedding = view.matrix("embed_tokens.weight", config.vocabulary, config.hidden)
        self._blocks = [_block(config, view.under(f"layers.{i}."), i) for i in range(config.num_layers)]
        self._norm_H = view.tensor("norm.weight", config.hidden)
        head = "embed_tokens.weight" if config.tied else "lm_head.weight"
        self._head = view.matrix(head, config.vocabulary, config.hidden)
        self.device = self._embedding.data.device
        self._rope = RopeTable(config.rope_theta, config.head_width, self.device)

    def new_state(self, max_positions: int, kv: KvFormat = "f32") -> SequenceState:
        config = self.config
        return SequenceState(
            max_positions,
            {
                layer: AttentionCache(max_positions, config.kv_heads, config.head_width, kv, self.device)
                for layer in range(config.num_layers)
            },
        )

    def new_training_state(self, sequences: int) -> TrainingState:
        return TrainingState(sequences, {layer: PassingCache() for layer in range(self.config.num_layers)})

    def forward(
        self,
        ops: Ops,
        ids: Sequence[int],
        state: StateParts,
        experts: ExpertExecutor,
        logits: LogitRows | int = "all",
        *,
        certain: bool = False,
    ) -> torch.Tensor | None:
        rows = take_rows(self._rope, ids, state, certain=certain)
        x_TH = ops.embedding(ids, self._embedding)
        for layer, block in enumerate(self._blocks):
            x_TH = block.forward(ops, x_TH, rows, state.attention[layer], experts)
        if logits == "none":
            return None
        x_TH = wanted_rows(x_TH, logits)
        return ops.linear(ops.rms_norm(x_TH, self._norm_H, self.config.eps), self._head)


def _block(config: Qwen3MoeConfig, view: WeightView, layer: int) -> _Block:
    hidden, width = config.hidden, config.head_width
    attention = Attention(
        query=view.matrix("self_attn.q_proj.weight", config.heads * width, hidden),
        key=view.matrix("self_attn.k_proj.weight", config.kv_heads * width, hidden),
        value=view.matrix("self_attn.v_proj.weight", config.kv_heads * width, hidden),
        output=view.matrix("self_attn.o_proj.weight", hidden, config.heads * width),
        query_norm_D=view.tensor("self_attn.q_norm.weight", width),
        key_norm_D=view.tensor("self_attn.k_norm.weight", width),
        eps=config.eps,
        heads=config.heads,
        kv_heads=config.kv_heads,
        width=width,
    )
    router = view.matrix("mlp.gate.weight", config.num_experts, hidden)
    return _Block(
        attention_norm_H=view.tensor("input_layernorm.weight", hidden),
        attention=attention,
        experts_norm_H=view.tensor("post_attention_layernorm.weight", hidden),
        moe=MixtureOfExperts(layer, router, config.top_k, config.renormalise),
        eps=config.eps,
    )
