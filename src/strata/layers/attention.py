"""Grouped-query attention with normed heads; optionally with a sigmoid output gate and a sparse index.

Lives in ``layers``: one form serves every family here, options are decided by the weights that a family builds it
with. It must not know models. Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.kernels.ops import Matrix, Ops
from strata.kvcache.parts import AttentionPart
from strata.layers.indexer import Indexer
from strata.layers.rows import Rows

__all__ = ["Attention"]


@dataclass(frozen=True, eq=False)
class Attention:
    """``gated``: the query projection holds, per head, D query rows and then D gate rows. ``plus_one``: head norms
    are times 1 + weight. ``indexer``: attend only the blocks it selects."""

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    query_norm_D: torch.Tensor
    key_norm_D: torch.Tensor
    eps: float
    heads: int
    kv_heads: int
    width: int
    gated: bool = False
    plus_one: bool = False
    indexer: Indexer | None = None

    def forward(self, ops: Ops, x_TH: torch.Tensor, rows: Rows, cache: AttentionPart) -> torch.Tensor:
        """y_TH; writes the rows' keys and values into the cache at their positions."""
        indexed = [] if self.indexer is None else self.indexer.projections(cache)
        q_TX, k_TX, v_TX, *projected = ops.linears(x_TH, [self.query, self.key, self.value, *indexed])
        k_TGD, v_TGD = k_TX.view(-1, self.kv_heads, self.width), v_TX.view(-1, self.kv_heads, self.width)
        q_TNXD = q_TX.view(-1, self.heads, 2 if self.gated else 1, self.width)
        q_TND, k_TGD = ops.norm_rope(
            [(q_TNXD[:, :, 0], self.query_norm_D), (k_TGD, self.key_norm_D)],
            self.eps, rows.cos_TR, rows.sin_TR, plus_one=self.plus_one,
        )  # fmt: skip
        k_PGD, v_PGD = cache.append(rows.start, k_TGD, v_TGD)
        scale = self.width**-0.5
        if self.indexer is None:
            o_TND = ops.attention(q_TND, k_PGD, v_PGD, rows.start, scale)
        else:
            blocks_TM = self.indexer.forward(ops, x_TH, projected, rows, cache)
            o_TND = ops.sparse_attention(q_TND, k_PGD, v_PGD, rows.start, scale, blocks_TM, self.indexer.block)
        if not self.gated:
            return ops.linear(o_TND.flatten(1), self.output)
        return ops.gated_linear(q_TNXD[:, :, 1], o_TND, self.output, "sigmoid")
