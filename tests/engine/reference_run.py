"""A pack's logits in plain torch on the CPU: FP32 over the weights as the pack holds them, or rounded as a BF16 run is.

Imports nothing but the package, so that a machine without an oracle can compare with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from strata.engine.models import open_model
from strata.kernels.ops import DeltaRows, Matrix
from strata.kernels.reference import ReferenceOps
from strata.kernels.reference.experts import ExpertWeights, ReferenceExperts
from strata.kernels.reference.ops import dense_weight

__all__ = ["ReferenceRun"]


class RoundedOps(ReferenceOps):
    """Operands of products and attention in BF16, sums in FP32; routers as they are."""

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        if weight_OI.format == "f32":
            return super().linear(x_TI, weight_OI)
        return functional.linear(x_TI.bfloat16().float(), dense_weight(weight_OI).bfloat16().float())

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        return super().attention(q_TND.bfloat16().float(), k_PGD, v_PGD, start, scale)

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        k, v = rows.k_TGD.bfloat16().float(), rows.v_TNV.bfloat16().float()
        rounded = DeltaRows(k, v, rows.beta_TN, rows.g_TN)
        return super().gated_delta(q_TGD.bfloat16().float(), rounded, state_NDV, pending, write=write)


class RoundedExperts(ReferenceExperts):
    """Rows, inner activations and results in BF16."""

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        experts, x_TH = self._layers[layer], x_TH.bfloat16().float()
        total = torch.zeros_like(x_TH)
        for expert in ids_TK.unique().tolist():
            rows, picks = (ids_TK == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(x_TH[rows], experts.gate_up_EOH[expert]).chunk(2, dim=-1)
            inner = (functional.silu(gate) * up).bfloat16().float()
            y = functional.linear(inner, experts.down_EHI[expert]).bfloat16().float()
            total.index_add_(0, rows, weights_TK[rows, picks, None] * y)
        return total


class ReferenceRun:
    """Opens a pack, its experts dequantised whole: for small models. Close it."""

    def __init__(self, pack: Path) -> None:
        self._opened = open_model(str(pack))
        reader, config = self._opened.reader, self._opened.config
        self._model = self._opened.family.build(config, self._opened.dense())
        self._layers = {}
        assert reader.layout is not None
        for layer in range(config.num_layers):
            read = [reader.read_expert(layer, expert) for expert in range(config.num_experts)]
            blobs, scales = torch.stack([blob for blob, _ in read]), torch.stack([scale for _, scale in read])
            gate, up, down = reader.layout.dequantise(blobs, scales)
            self._layers[layer] = ExpertWeights(torch.cat((gate, up), dim=1).float(), down.float())

    def close(self) -> None:
        self._opened.close()

    @torch.no_grad()
    def logits(self, parts: Sequence[Sequence[int]], *, rounded: bool) -> torch.Tensor:
        """FP32 logits after each part of one sequence."""
        ops = RoundedOps() if rounded else ReferenceOps()
        experts = (RoundedExperts if rounded else ReferenceExperts)(self._layers)
        state = self._model.new_state(sum(map(len, parts)), "bf16" if rounded else "f32")
        found = []
        for part in parts:
            row = self._model.forward(ops, list(part), state, experts, "last", certain=True)
            assert row is not None
            state.commit(len(part))
            found.append(row[0])
        return torch.stack(found)
