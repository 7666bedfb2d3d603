"""Whether the compiled blocks' gradients are right on this very machine, asked before a run is paid for.

Lives beside the trainer because no test elsewhere sees a GPU's kernels: one block of each kind runs forward and
backward at the run's own size, and every tensor's gradient is compared with that of the same block run plainly (not
compiled, FP32 products, attention written out, wide experts). A kind that disagrees is named, so that the trainer can
leave it uncompiled. Knows blocks only as functions of tensors and parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from layers import MixtureOfExperts
from model import TrainModel
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["LIMIT", "Disagreement", "compare"]

LIMIT = 0.3  # BF16 alone reaches 0.1 where it changes which expert a row picks


@dataclass(frozen=True)
class Disagreement:
    """The worst tensor of a kind of block: |found - expected| / |expected|, and the norms behind it."""

    kind: str
    tensor: str
    error: float
    found: float
    expected: float

    @property
    def good(self) -> bool:
        return self.error < LIMIT  # false for a NaN too


@contextlib.contextmanager
def _plainly(model: nn.Module) -> Iterator[None]:
    """FP32 products without TF32, attention written out, wide experts."""
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    forms, precision = [m.grouped for m in layers], torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for m in layers:
        m.grouped = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for m, form in zip(layers, forms, strict=True):
            m.grouped = form


Call = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def _gradients(call: Call, parameters: list[nn.Parameter], x: torch.Tensor, low: bool) -> list[torch.Tensor | None]:
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=low):
        out = call(x)
    y, *losses = out if isinstance(out, tuple) else (out,)
    probe = torch.empty_like(y).normal_(generator=torch.Generator(x.device).manual_seed(1))
    total = (y.float() * probe).sum() + sum(part.sum() for part in losses)
    return list(torch.autograd.grad(total, [x, *parameters], allow_unused=True))


def _worst(
    kind: str, names: list[str], found: list[torch.Tensor | None], right: list[torch.Tensor | None]
) -> Disagreement:
    worst = Disagreement(kind, "", 0.0, 0.0, 0.0)
    for name, a, b in zip(names, found, right, strict=True):
        if a is None or b is None:
            continue
        size = float(b.double().norm())
        error = float((a.double() - b.double()).norm()) / max(size, 1e-30)
        if size > 0 and not error <= worst.error:
            worst = Disagreement(kind, name, error, float(a.double().norm()), size)
    return worst


def compare(model: TrainModel, windows_BT2: torch.Tensor, picked_R: torch.Tensor, low: bool) -> list[Disagreement]:
    """The worst tensor of each kind: a delta layer, an attention layer, the n-gram block, the head with its loss.

    ``low`` runs the found side under BF16 autocast, as training does. Costs a few seconds and, at sixteen windows of
    4,096 tokens, about 60 GB of a GPU.
    """
    ids, targets = windows_BT2[:, :-2], windows_BT2[:, 1:-1]
    rows = ids.shape[1]
    cos, sin = model.cos[:rows], model.sin[:rows]
    attention = next(i for i in range(model.c.layers) if model.c.is_attention(i))
    ple = model.layers[1].ple
    with torch.no_grad():
        x = F.embedding(ids, model.embed_tokens.weight).unsqueeze(2).repeat(1, 1, model.c.streams, 1)
        x += 0.1 * torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(2))

    def layer(block: nn.Module, call: Call) -> tuple[nn.Module, Call]:
        return block, lambda x: call(x, cos, sin, picked_R)[:3]  # type: ignore[index]

    first, later = model.layers[0], model.layers[attention]
    found = {
        "delta": layer(first, first),
        "attention": layer(later, later),
        "ngram": (ple, lambda x: ple(x, ple.lookup(ids))),
        "head": (model.hyper_connection_mixer, lambda x: model.cross_entropy(x, targets, False)),
    }
    right = {
        "delta": layer(first, first.forward),
        "attention": layer(later, later.forward),
        "ngram": (ple, lambda x: ple.forward(x, ple.lookup(ids))),
        "head": (model.hyper_connection_mixer, lambda x: TrainModel.cross_entropy(model, x, targets, False)),
    }
    answers = []
    for kind, (block, call) in found.items():
        named = [(n, p) for n, p in block.named_parameters() if not n.startswith("ple.")]
        parameters = [p for _, p in named] + ([model.lm_head.weight] if kind == "head" else [])
        names = ["input", *(n for n, _ in named), *(["lm_head.weight"] if kind == "head" else [])]
        ours = _gradients(call, parameters, x, low)
        with _plainly(model):
            theirs = _gradients(right[kind][1], parameters, x, False)
        answers.append(_worst(kind, names, ours, theirs))
        del ours, theirs
    return answers
