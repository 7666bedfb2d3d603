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
        self: Ops, gate: torch.Tensor, x: torch.Tensor, weight_OI: Matrix, kind: Literal["sigmoid", "silu"]
    ) -> torch.Tensor:
        gated = self.sigmoid_mul(gate, x) if kind == "sigmoid" else self.silu_mul(gate, x)
        return self.linear(gated.flatten(1), weight_OI)

    def swiglu(self: Ops, x_TH: torch.Tensor, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> torch.Tensor:
        gate_TI, up_TI = self.linears(x_TH, [gate_IH, up_IH])
        return self.gated_linear(gate_TI, up_TI, down_HI, "silu")

    def add_gated(self: Ops, y_TH: torch.Tensor, gate_T1: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        return self.add(y_TH, self.sigmoid_mul(gate_T1, x_TH))

    def norm_rope(
        self: Ops,
        heads: Sequence[tuple[torch.Tensor, torch.Tensor]],
        eps: float,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        *,
        plus_one: bool,
    ) -> list[torch.Tensor]:
        normed = [self.rms_norm(x_TND, weight_D, eps, plus_one=plus_one) for x_TND, weight_D in heads]
        return [self.rope(x_TND, cos_TR, sin_TR) for x_TND in normed]

    def start_streams(self, x_TH: torch.Tensor, streams: int) -> torch.Tensor:
        return x_TH.unsqueeze(1).repeat(1, streams, 1)
