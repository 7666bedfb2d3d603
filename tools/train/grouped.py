"""Routed experts as grouped products: rows sorted by expert, one product over ragged groups each way.

Lives beside the trainer's model as the alternative to its wide products; probe.py measures the two against each
other. Deterministic: rows are moved by permutations whose gradients are permutations, never by additions in any
order. Knows nothing of routers.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["grouped_experts"]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, back):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


def grouped_experts(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """y_TH = sum over k of weights[t, k] * expert[ids[t, k]](x[t]); gate_up is E x 2I x H, down E x H x I, BF16."""
    rows, picks = ids_TK.shape
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    experts = torch.arange(gate_up.shape[0], device=flat.device)
    ends = torch.searchsorted(flat[order], experts, right=True).to(torch.int32)
    spread = x_TH.unsqueeze(1).expand(rows, picks, -1).flatten(0, 1)
    sorted_x = _Permute.apply(spread, order, back)
    gate, up = torch._grouped_mm(sorted_x, gate_up.mT, offs=ends).chunk(2, dim=-1)
    scaled = _Permute.apply(weights_TK.flatten().unsqueeze(-1), order, back)
    inner = F.silu(gate) * up * scaled.to(gate.dtype)
    y = torch._grouped_mm(inner, down.mT, offs=ends)
    return _Permute.apply(y, back, order).unflatten(0, (rows, picks)).sum(1)
