"""A mixture of experts: router, the call to the experts wherever they lie, and the shared expert.

Lives in ``layers``; ``experts`` is reached only through the ``ExpertExecutor`` argument. It must not know models or
tiers. Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.kernels.ops import ExpertExecutor, Matrix, Ops

__all__ = ["MixtureOfExperts", "SharedExpert"]


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """A dense SwiGLU expert that every row passes through, weighted by a sigmoid gate (a 1 x H matrix)."""

    gate: Matrix
    up: Matrix
    down: Matrix
    weight: Matrix


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """``layer`` is the number that the executor knows this layer's experts by."""

    layer: int
    router: Matrix
    top_k: int
    renormalise: bool
    shared: SharedExpert | None = None

    def forward(self, ops: Ops, x_TH: torch.Tensor, experts: ExpertExecutor) -> torch.Tensor:
        """y_TH: routed experts in router order, then the shared expert."""
        shared = self.shared
        if shared is None:
            return self._routed(ops, x_TH, ops.linear(x_TH, self.router), experts)
        projections = [self.router, shared.weight, shared.gate, shared.up]
        logits_TE, weight_T1, gate_TI, up_TI = ops.linears(x_TH, projections)
        shared_TH = ops.gated_linear(gate_TI, up_TI, shared.down, "silu")
        return ops.add_gated(self._routed(ops, x_TH, logits_TE, experts), weight_T1, shared_TH)

    def _routed(self, ops: Ops, x_TH: torch.Tensor, logits_TE: torch.Tensor, experts: ExpertExecutor) -> torch.Tensor:
        ids_TK, weights_TK = ops.router(logits_TE, self.top_k, renormalise=self.renormalise)
        return experts(self.layer, x_TH, ids_TK, weights_TK)
