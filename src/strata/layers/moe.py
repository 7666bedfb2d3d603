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

    def forward(self, ops: Ops, x_TH: torch.Tensor) -> torch.Tensor:
        return ops.sigmoid_mul(ops.linear(x_TH, self.weight), ops.swiglu(x_TH, self.gate, self.up, self.down))


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
        ids_TK, weights_TK = ops.router(ops.linear(x_TH, self.router), self.top_k, renormalise=self.renormalise)
        y_TH = experts(self.layer, x_TH, ids_TK, weights_TK)
        return y_TH if self.shared is None else ops.add(y_TH, self.shared.forward(ops, x_TH))
