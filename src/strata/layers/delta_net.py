"""Gated delta net: linear attention with a matrix state per head, updated by the delta rule.

Lives in ``layers``. A window records k, v, beta, g of its rows and writes no state; what commit accepted is folded by
the next forward with the same per-row recurrence. It must not know models. Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from strata.kernels.ops import DeltaWeights, Matrix, Ops
from strata.kvcache.parts import DeltaPart
from strata.layers.rows import Rows

__all__ = ["DeltaNet"]


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """``qkv`` projects to C channels, ``z`` to the output gate (N*V), ``beta`` and ``decay`` to one value a head."""

    qkv: Matrix
    z: Matrix
    beta: Matrix
    decay: Matrix
    output: Matrix
    weights: DeltaWeights
    norm_V: torch.Tensor
    eps: float
    gate: Literal["sigmoid", "silu"]

    def forward(self, ops: Ops, x_TH: torch.Tensor, rows: Rows, state: DeltaPart) -> torch.Tensor:
        """y_TH; folds what was accepted before, records these rows (or, if certain, advances the state by them)."""
        qkv_TC, z_TX, b_TN, a_TN = ops.linears(x_TH, [self.qkv, self.z, self.beta, self.decay])
        q_TGD, recorded = ops.delta_inputs(qkv_TC, state.tail.rows_UC, b_TN, a_TN, self.weights)
        o_TNV = ops.gated_delta(q_TGD, recorded, state.state_NDV, state.pending, write=rows.certain)
        state.record(qkv_TC, recorded, written=rows.certain)
        o_TNV = ops.gated_norm(o_TNV, z_TX.view(o_TNV.shape), self.norm_V, self.eps, self.gate)
        return ops.linear(o_TNV.reshape(o_TNV.shape[0], -1), self.output)
