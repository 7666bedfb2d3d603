"""TrainingOps: the reference operations over a batch of whole sequences, nothing written, everything differentiable.

Lives in ``kernels/reference`` beside the operations it inherits. A batch is B sequences of equal length laid one
after another, so rows are B*T and every row-wise operation is unchanged; only operations that look along a sequence
are replaced here. Every sequence starts at position 0 with empty state: tails, recurrent state and pending rows that
are passed in are those of an empty sequence and are not read. It must not know models or caches.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from strata.kernels.ops import DeltaRows
from strata.kernels.reference import sparse
from strata.kernels.reference.delta import chunked_delta
from strata.kernels.reference.ops import ReferenceOps, _convolve

__all__ = ["TrainingOps"]


class TrainingOps(ReferenceOps):
    """See the module's page. ``sequences`` is B; the number of rows of every call is a multiple of it."""

    name = "training"

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x, 0, (self.sequences, -1))

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        assert start == 0
        q, k, v = (self._split(x).transpose(1, 2) for x in (q_TND, k_PGD, v_PGD))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        tail = (weight_CW.shape[1] - 1) * dilation
        return _convolve(functional.pad(self._split(x_TC), (0, 0, tail, 0)), weight_CW, dilation).flatten(0, 1)

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        heads, width = rows.v_TNV.shape[1:]
        empty = rows.v_TNV.new_zeros(self.sequences, heads, q_TGD.shape[-1], width)
        split = (self._split(x) for x in (q_TGD, rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN))
        q, k, v, beta, g = split
        out_BTNV, _ = chunked_delta(q, k, v, beta, g, empty)
        return out_BTNV.flatten(0, 1)

    def select_blocks(
        self, q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int
    ) -> torch.Tensor:
        queries, keys = self._split(q_TND), self._split(key_BD)
        return torch.cat(
            [sparse.select_blocks(q, k, start, block, top_blocks) for q, k in zip(queries, keys, strict=True)]
        )

    def sparse_attention(
        self,
        q_TND: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        start: int,
        scale: float,
        blocks_TM: torch.Tensor | None,
        block: int,
    ) -> torch.Tensor:
        if blocks_TM is None:
            return self.attention(q_TND, k_PGD, v_PGD, start, scale)
        parts = (self._split(x) for x in (q_TND, k_PGD, v_PGD, blocks_TM))
        outputs = [
            sparse.gathered_attention(q, k, v, start, scale, listed, block)
            for q, k, v, listed in zip(*parts, strict=True)
        ]
        return torch.cat(outputs)
