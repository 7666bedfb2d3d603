"""Hyper-connections: S residual streams, a mixer that reads a block's input from them and writes its output back.

Lives in ``layers``; replaces block norms and the final norm. It must not know models or what the block does.
Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from strata.kernels.ops import HyperWeights, Ops

__all__ = ["hyper_connected"]


def hyper_connected(
    ops: Ops, x_TSH: torch.Tensor, mixer: HyperWeights, block: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The streams after ``block`` (u_TH -> y_TH) has read its input from them and its output was injected."""
    u_TH, c_TS = ops.hyper_mix(x_TSH, mixer)
    assert c_TS is not None
    return ops.hyper_add(x_TSH, c_TS, block(u_TH))
