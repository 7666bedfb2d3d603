"""Routed experts in torch: every expert of every layer as one FP32 (or BF16) tensor, differentiable.

Lives in ``kernels/reference`` because it is the plain meaning of ``ExpertExecutor``: no tiers, no slots, no
quantised rows. Parity tests and training use it. It must not know where the weights came from.
Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["ExpertWeights", "ReferenceExperts"]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """All routed experts of one layer. Tensors (or parameters) are borrowed; FP32 or BF16."""

    gate_up_EOH: torch.Tensor  # E x 2I x H, gate rows first
    down_EHI: torch.Tensor


class ReferenceExperts:
    """An ``ExpertExecutor`` over weights held whole. Products run in FP32 unless autocast says otherwise."""

    def __init__(self, layers: Mapping[int, ExpertWeights]) -> None:
        self._layers = layers

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """See ``ExpertExecutor``: rows are grouped by expert, results summed over k in router order."""
        expert = self._layers[layer]
        order, counts = _group(ids_TK, expert.gate_up_EOH.shape[0])
        x = x_TH[order // ids_TK.shape[1]]
        results = [
            _swiglu(rows, expert.gate_up_EOH[e], expert.down_EHI[e])
            for e, rows in enumerate(torch.split(x, counts))
            if rows.shape[0]
        ]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        y_TKH = torch.cat(results)[back].view(*ids_TK.shape, -1)
        total = torch.zeros_like(x_TH)
        for k in range(ids_TK.shape[1]):
            total = total + weights_TK[:, k, None] * y_TKH[:, k]
        return total


def _group(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """(flat picks sorted by expert, how many each expert has)."""
    flat = ids_TK.flatten().long()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True), counts


def _swiglu(x_TH: torch.Tensor, gate_up_OH: torch.Tensor, down_HI: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x_TH, gate_up_OH.float()).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down_HI.float())
