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


class CudaCalls:
    """torch's own calls of cuBLAS, FlashAttention-2, by name."""

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


class PlainCalls:
    """The same on the CPU, for a card that is emulated: each row by itself, whatever the others are."""

    def __init__(self) -> None:
        self._ops = CpuOps()

    def product(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        weight = weight_OI.float().contiguous()
        return self._ops.linear(x_TI.float().contiguous(), Matrix("f32", weight, weight.shape[1]))

    def attention(self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, scale: float) -> torch.Tensor:
        return causal_attention(q_TND.float(), k_PGD, v_PGD, k_PGD.shape[0] - q_TND.shape[0], scale)


def calls_for(device: torch.device) -> LibraryCalls:
    return CudaCalls() if device.type == "cuda" else PlainCalls()
