"""Operations that are made of others: what an implementation has where it has nothing faster.

Lives in ``kernels`` beside the protocol (ops.py), whose docstrings say what each gives. An implementation that records
launches replaces them by single launches with the same meaning. It must not know models, and computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from strata.kernels.ops import Matrix, Ops

__all__ = ["ComposedOps"]


class ComposedOps:
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def linears(self: Ops, x_TI: torch.Tensor, weights: Sequence[Matrix]) -> list[torch.Tensor]:
        return [self.linear(x_TI, weight) for weight in weights]

    def gated_linear(
        self: Ops, gate_TI: torch.Tensor, x_TI: torch.Tensor, weight_OI: Matrix, kind: Literal["sigmoid", "silu"]
    ) -> torch.Tensor:
        gated = self.sigmoid_mul(gate_TI, x_TI) if kind == "sigmoid" else self.silu_mul(gate_TI, x_TI)
        return self.linear(gated, weight_OI)

    def swiglu(self: Ops, x_TH: torch.Tensor, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> torch.Tensor:
        gate_TI, up_TI = self.linears(x_TH, [gate_IH, up_IH])
        return self.gated_linear(gate_TI, up_TI, down_HI, "silu")

    def add_gated(self: Ops, y_TH: torch.Tensor, gate_T1: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        return self.add(y_TH, self.sigmoid_mul(gate_T1, x_TH))

    def split_heads(self, x_TX: torch.Tensor, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        x_TN2D = x_TX.view(-1, heads, 2, width)
        return x_TN2D[:, :, 0].contiguous(), x_TN2D[:, :, 1].reshape(-1, heads * width)

    def start_streams(self, x_TH: torch.Tensor, streams: int) -> torch.Tensor:
        return x_TH.unsqueeze(1).repeat(1, streams, 1)
