"""Qwen4-Exp's draft block (MTP): guesses the token after next from the target's streams and the next token.

Lives in ``models`` beside the blocks it shares; the head and the embedding are the model's. A chain of drafts feeds
the block's own streams back to it. It must not know tiers or how drafts are verified.
Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from strata.kernels.ops import ExpertExecutor, Ops
from strata.kvcache.attention_cache import KvFormat
from strata.kvcache.parts import StateParts
from strata.kvcache.sequence_state import SequenceState
from strata.kvcache.training_state import PassingCache, PassingIndex, TrainingState
from strata.layers.rows import take_rows
from strata.models.qwen4_exp_model import build_block, build_mixer, new_attention_cache
from strata.models.weight_view import WeightView

if TYPE_CHECKING:
    from strata.models.qwen4_exp_model import Qwen4Exp

__all__ = ["DraftBlock"]


class DraftBlock:
    """One full-attention block with its own index, experts and final mixer. Experts know it as layer ``num_layers``.

    Row i pairs the target's streams of token i (before the target's final mixer) with token i + 1 and takes position i.
    """

    def __init__(self, model: Qwen4Exp, view: WeightView) -> None:
        config = model.config
        hidden = config.hidden
        self.layer = config.num_layers
        self._model = model
        self._hidden_norm_H = view.tensor("pre_fc_norm_hidden.weight", hidden)
        self._embedding_norm_H = view.tensor("pre_fc_norm_embedding.weight", hidden)
        self._hidden = view.matrix("fc.hidden", hidden, hidden)
        self._embedding = view.matrix("fc.embedding", hidden, hidden)
        self._block = build_block(config, view.under("layers.0."), self.layer, linear=False)
        self._mixer = build_mixer(config, view.under("hyper_connection_mixer."), inject=False)

    def new_state(self, max_positions: int, kv: KvFormat = "f32") -> SequenceState:
        """An empty draft state; attention only, so ``truncate`` can take drafts back."""
        cache = new_attention_cache(self._model.config, max_positions, kv, self._model.device)
        return SequenceState(max_positions, {self.layer: cache})

    def new_training_state(self, sequences: int) -> TrainingState:
        index = PassingIndex(sequences, self._model.config.index_block)
        return TrainingState(sequences, {self.layer: PassingCache(index)})

    def forward(
        self, ops: Ops, next_ids: Sequence[int], x_TSH: torch.Tensor, state: StateParts, experts: ExpertExecutor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits_TV of the token after next, the block's own streams for the next draft). Rows are recorded like a
        model's: commit follows."""
        eps, streams = self._model.config.eps, self._model.config.streams
        rows = take_rows(self._model.rope, next_ids, state, certain=False)
        embedded = ops.embedding(next_ids, self._model.embedding)
        embedded = ops.linear(ops.rms_norm(embedded, self._embedding_norm_H, eps, plus_one=True), self._embedding)
        normed_TSH = ops.rms_norm(x_TSH, self._hidden_norm_H, eps, plus_one=True)
        hidden_TSH = ops.linear(normed_TSH.reshape(-1, x_TSH.shape[-1]), self._hidden).view(x_TSH.shape)
        x_TSH = ops.add(hidden_TSH, ops.start_streams(embedded, streams))
        x_TSH = self._block.forward(ops, x_TSH, rows, state, experts)
        return self._model.head(ops, x_TSH, self._mixer), x_TSH
