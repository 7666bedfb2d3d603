"""The sparse index of an attention layer: which blocks of earlier tokens a row attends.

Lives in ``layers`` beside attention. Index keys are cached raw per token; a block's key exists once its last token
does. While every block is within the budget nothing is selected and the queries are not even computed. It must not
know models. Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.kernels.ops import Matrix, Ops
from strata.kvcache.parts import AttentionPart
from strata.layers.rows import Rows

__all__ = ["Indexer"]


@dataclass(frozen=True, eq=False)
class Indexer:
    """``query`` has N*D rows, ``key`` D rows. ``block`` tokens share an index key; ``top_blocks`` are attended."""

    query: Matrix
    key: Matrix
    query_norm_D: torch.Tensor
    key_norm_D: torch.Tensor
    eps: float
    heads: int
    width: int
    block: int
    top_blocks: int

    def projections(self, cache: AttentionPart) -> list[Matrix]:
        """What is projected together with the layer's keys and values; ``forward`` takes the results."""
        index = cache.index
        assert index is not None
        return [self.key, self.query] if index.selects_always else [self.key]

    def forward(
        self, ops: Ops, x_TH: torch.Tensor, projected: Sequence[torch.Tensor], rows: Rows, cache: AttentionPart
    ) -> torch.Tensor | None:
        """blocks_TM for ``Ops.sparse_attention``, None while every row sees at most ``top_blocks`` complete blocks."""
        index = cache.index
        assert index is not None
        positions, raw_BJD = index.append(rows.start, projected[0])
        if len(positions):
            cos_BR, sin_BR = rows.rope.at(positions)
            key_BD = ops.index_block_keys(raw_BJD, self.key_norm_D, self.eps, cos_BR, sin_BR)
        else:
            key_BD = x_TH.new_empty(0, self.width)
        complete, key_BD = index.finish(rows.start, x_TH.shape[0], key_BD)
        if complete <= self.top_blocks:
            return None
        q_TX = projected[1] if index.selects_always else ops.linear(x_TH, self.query)
        heads = [(q_TX.view(-1, self.heads, self.width), self.query_norm_D)]
        (q_TND,) = ops.norm_rope(heads, self.eps, rows.cos_TR, rows.sin_TR, plus_one=True)
        return ops.select_blocks(q_TND, key_BD, rows.start, self.block, self.top_blocks)
