"""The processes of one run: one a GPU, started by ``torchrun``, with equal weights and shares of every batch.

Lives beside the trainer and knows neither model nor schedule. A run without ``torchrun`` is a group of one, for which
every call here does nothing. Each process takes every N-th row of a batch, gradients and figures are averaged by one
all-reduce of one flat tensor (NCCL gives every process the same bits, so weights stay equal without being sent), and
whatever depends on the clock is what the first process says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import distributed

__all__ = ["Group"]


class Group:
    """``rank`` of ``size`` processes; ``device`` is this process's."""

    def __init__(self, cpu: bool) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available() and not cpu
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            distributed.init_process_group("nccl" if cuda else "gloo")

    def close(self) -> None:
        if self.size > 1:
            distributed.destroy_process_group()

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first process's tensor, in place; shapes are equal."""
        if self.size > 1:
            distributed.broadcast(tensor, 0)
        return tensor

    def agreed(self, value: float) -> float:
        """What the first process passed."""
        if self.size == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.broadcast(told, 0)
        return float(told)

    @torch.no_grad()
    def average(self, parameters: Sequence[torch.nn.Parameter], figures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Averages the gradients in place; returns the averages of the scalars."""
        if self.size == 1:
            return list(figures)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in gradients), torch.stack([f.float() for f in figures])])
        distributed.all_reduce(flat)
        flat /= self.size
        parts = flat.split([*(g.numel() for g in gradients), len(figures)])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=False)])
        return list(parts[-1].unbind())
