"""Muon for matrices, AdamW for the rest: the smallest thing that trains this model fast.

Lives beside the trainer. Muon (Jordan, 2024) steps along the orthogonalised momentum of a matrix; equal shapes are
stacked, so that a step of all matrices is a few batched products. Embeddings, the head, norms, convolutions, routers
and other thin or sparse parameters take AdamW, fused. Knows parameter names only through ``is_matrix``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

__all__ = ["Optimiser"]

MUON_RATE = 0.012
ADAM_RATE = 3e-3
ROUTER_RATE = 1e-3  # routers that move faster than their experts collapse
MOMENTUM = 0.95
MATRIX_DECAY = 0.02
_THIN = ("gate.weight", "block_inject_weight.weight", "in_proj_a.weight", "in_proj_b.weight", "conv1d.weight")
_TABLES = ("embed_tokens.weight", "lm_head.weight", "ngram_embedding.weight", "index_qk_proj.weight")


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon steps this parameter."""
    return parameter.ndim >= 2 and not name.endswith((*_THIN, *_TABLES, "shared_expert_gate.weight"))


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """About U V^T of each matrix of a stack, by five quintic Newton-Schulz steps (coefficients: Jordan, 2024)."""
    turned = g.shape[-2] > g.shape[-1]
    x = g.mT if turned else g
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)  # no floor that a clipped gradient could reach
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if turned else x).float()


class Optimiser:
    """Holds the momenta. ``step(scale)`` moves every parameter that asks for gradients; ``scale`` is the schedule's
    factor of both rates."""

    def __init__(self, model: nn.Module) -> None:
        self.groups: dict[tuple[bool, tuple[int, ...]], list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        routers: list[nn.Parameter] = []
        learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in learned]
        for name, p in learned:
            if is_matrix(name, p):
                self.groups[(name.endswith("gate_up_proj"), tuple(p.shape))].append(p)  # gate and up are two matrices
            elif name.endswith("mlp.gate.weight"):
                routers.append(p)
            elif name.endswith(_TABLES):
                decayed.append(p)
            else:
                others.append(p)
        self.momenta = {key: torch.zeros(len(ps), *key[1], device=ps[0].device) for key, ps in self.groups.items()}
        fused = self.parameters[0].is_cuda
        self.adam = torch.optim.AdamW(
            [
                {"params": others, "weight_decay": 0.0},
                {"params": decayed, "weight_decay": 0.01},
                {"params": routers, "weight_decay": 0.0},
            ],
            lr=ADAM_RATE,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=fused,
        )

    def clip(self, limit: float) -> torch.Tensor:
        """The gradients' norm before clipping to ``limit`` (a tensor: no wait)."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group, rate in zip(self.adam.param_groups, (ADAM_RATE, ADAM_RATE, ROUTER_RATE), strict=True):
            group["lr"] = rate * scale
        self.adam.step()
        for (halves, shape), parameters in self.groups.items():
            self._muon(self.momenta[halves, shape], parameters, halves, MUON_RATE * scale)
        for p in self.parameters:
            p.grad = None

    def _muon(self, momenta: torch.Tensor, parameters: list[nn.Parameter], halves: bool, rate: float) -> None:
        gradients = torch.stack([p.grad for p in parameters])  # type: ignore[misc]
        momenta.lerp_(gradients, 1 - MOMENTUM)
        ahead = gradients.lerp_(momenta, MOMENTUM)
        update = orthogonalise(ahead.unflatten(-2, (2, -1)) if halves else ahead)
        rows, columns = update.shape[-2:]
        update = update.reshape(momenta.shape) * (-rate * max(1.0, rows / columns) ** 0.5)
        torch._foreach_mul_(parameters, 1 - rate * MATRIX_DECAY)
        torch._foreach_add_(parameters, list(update.unbind(0)))

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momenta": list(self.momenta.values())}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, theirs in zip(self.momenta.values(), state["momenta"], strict=True):
            mine.copy_(theirs)
