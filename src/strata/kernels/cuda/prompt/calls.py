"""The library's products and attention of a prompt's pass: one function each, with a plain substitute on the CPU.

Lives in ``kernels/cuda/prompt`` as the one place that names a library's kernel. A pass has one number of rows and
begins at a multiple of it, so every call has one shape at one position: whatever algorithm the library has for that
shape, it is the same in every chunk (decision record 0131). It must not know models.

Legend: T rows of a pass, I input and O output width, N query heads, G key/value heads, D head width, P positions.
"""

from __future__ import annotations

from typing import Protocol

import torch

from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import Matrix
from strata.kernels.reference.sparse import causal_attention

__all__ = ["CudaCalls", "LibraryCalls", "PlainCalls", "calls_for"]


class LibraryCalls(Protocol):
    """Products sum in FP32; BF16 operands give FP32."""

    def product(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """y_TO of BF16 operands, or of FP32 ones without rounding them."""

    def attention(self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, scale: float) -> torch.Tensor:
        """o_TND FP32 of the last T of P positions: row t sees those up to P - T + t. BF16 operands."""

    def masked_attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, seen_TP: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """o_TND FP32; row t sees the positions where ``seen`` is true, at least one."""


class CudaCalls:
    """torch's own calls of cuBLAS, FlashAttention-2 and its memory-efficient attention, by name."""

    def __init__(self) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def product(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        if x_TI.dtype == torch.float32:
            return torch.mm(x_TI, weight_OI.T)
        return torch.mm(x_TI, weight_OI.T, out_dtype=torch.float32)

    def attention(self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, scale: float) -> torch.Tensor:
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_PGD, v_PGD)]
        found = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True, False, scale=scale)
        out: torch.Tensor = found[0]
        return out.squeeze(0).transpose(0, 1).float()

    def masked_attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, seen_TP: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows, heads, width = q_TND.shape
        groups = k_PGD.shape[1]
        q = q_TND.view(rows, groups, heads // groups, width).permute(1, 2, 0, 3)
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, heads // groups, -1, -1) for x in (k_PGD, v_PGD))
        hidden = torch.zeros(seen_TP.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen_TP, float("-inf"))
        bias = hidden.expand(groups, heads // groups, -1, -1)
        found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, False, scale=scale)
        out: torch.Tensor = found[0]  # groups x heads of one x rows x width
        return out.permute(2, 0, 1, 3).reshape(rows, heads, width).float()


class PlainCalls:
    """The same on the CPU, for a card that is emulated: each row by itself, whatever the others are."""

    def __init__(self) -> None:
        self._ops = CpuOps()

    def product(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        weight = weight_OI.float().contiguous()
        return self._ops.linear(x_TI.float().contiguous(), Matrix("f32", weight, weight.shape[1]))

    def attention(self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, scale: float) -> torch.Tensor:
        return causal_attention(q_TND.float(), k_PGD, v_PGD, k_PGD.shape[0] - q_TND.shape[0], scale)

    def masked_attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, seen_TP: torch.Tensor, scale: float
    ) -> torch.Tensor:
        groups = k_PGD.shape[1]
        q = q_TND.float().unflatten(1, (groups, -1))
        scores = torch.einsum("tgqd,pgd->tgqp", q, k_PGD.float()) * scale
        weights = scores.masked_fill(~seen_TP[:, None, None, :], float("-inf")).softmax(-1)
        return torch.einsum("tgqp,pgd->tgqd", weights, v_PGD.float()).flatten(1, 2)


def calls_for(device: torch.device) -> LibraryCalls:
    return CudaCalls() if device.type == "cuda" else PlainCalls()
