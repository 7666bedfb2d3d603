"""Gradients of the trainer under low precision, of its grouped experts, and the check that a GPU's kernels pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.small_sizes import SMALL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

import agree
import delta
from layers import MixtureOfExperts
from model import Config, TrainModel
from optimiser import orthogonalise

TWO_LAYERS: dict[str, Any] = SMALL | {"layers": 2, "interval": 2, "context": 128}
REAL_WIDTHS: dict[str, Any] = {"vocabulary": 512, "layers": 2, "interval": 2, "context": 1024, "eos": (500, 501)}

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.baddbmm.out}
own = torch.ops.strata_train
OWN = {
    own.unit_lower_inverse.default: delta.unit_lower_inverse._init_fn,
    own.chunk_states.default: delta.chunk_states._init_fn,
    own.chunk_states_backward.default: delta.chunk_states_backward._init_fn,
}


class RoundedProducts(TorchDispatchMode):
    """Rounds the factors of every product to BF16: coarser than TF32 and than what autocast rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OWN:
            with self:
                return OWN[func](*args)
        if func in PRODUCTS:
            self.count += 1
            first = len(args) - 2
            args = (*args[:first], *(x.bfloat16().float() for x in args[first:]))
        return func(*args, **(kwargs or {}))


def norms(model: TrainModel, ids: torch.Tensor) -> dict[str, float]:
    model.zero_grad()
    model(ids, torch.arange(0, ids.shape[1] - 2, 16), 0.3).loss.backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


def test_fresh_gradients_at_real_width_are_sane_and_survive_rounding() -> None:
    """Text as repetitive as code: words of three tokens out of a short list, some lines repeated."""
    torch.set_num_threads(1)
    model = TrainModel(Config(**REAL_WIDTHS))
    model.initialise(7)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 500, (40, 3), generator=generator)
    ids = words[torch.randint(0, 40, (342,), generator=generator)].flatten()[None, :1026].clone()
    ids[:, 600:700] = 11
    exact = norms(model, ids)
    with RoundedProducts() as rounded:
        coarse = norms(model, ids)
    assert rounded.count > 100
    assert sum(v * v for v in exact.values()) ** 0.5 < 10
    assert max(exact.values()) < 5
    off = {name: (coarse[name], value) for name, value in exact.items() if abs(coarse[name] - value) > 0.25 * value}
    assert off == {}


def test_grouped_experts_give_what_the_wide_ones_give() -> None:
    """Values and gradients, to the rounding of BF16; one expert is never picked."""
    config = Config(**TWO_LAYERS)
    moe = MixtureOfExperts(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_((torch.empty(p.shape).normal_(0.0, 0.2, generator=generator)).bfloat16())
        moe.gate.weight[3] = 0.0
        moe.gate.weight[3, 0] = -50.0
    x = torch.empty(2, 96, 64).normal_(generator=generator).bfloat16().float()
    x[..., 0] = x[..., 0].abs() + 0.5
    probe = torch.empty(2, 96, 64).normal_(generator=generator)
    answers = []
    for grouped in (False, True):
        moe.grouped = grouped
        inner = x.clone().requires_grad_()
        y, balance, share = moe(inner)
        assert float(share[3]) == 0.0
        parameters = list(moe.parameters())
        answers.append([y, *torch.autograd.grad((y * probe).sum() + balance, [inner, *parameters])])
    for wide, grouped in zip(*([t.detach() for t in answer] for answer in answers), strict=True):
        assert float((grouped - wide).norm() / wide.norm()) < 0.01


@pytest.fixture
def small() -> TrainModel:
    model = TrainModel(Config(**TWO_LAYERS))
    model.initialise(3)
    return model


def test_the_check_of_gradients_names_the_kind_that_is_wrong(small: TrainModel) -> None:
    window = torch.randint(0, 250, (2, 130), generator=torch.Generator().manual_seed(5))
    picked = torch.arange(0, 128, 16)

    def judged() -> dict[str, bool]:
        return {a.kind: a.good for a in agree.compare(small, window, picked, low=False)}

    assert judged() == {"delta": True, "attention": True, "ngram": True, "head": True}
    layer = small.layers[1]

    def broken(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        """The right values with twice the gradient, which no look at a loss would show."""
        return layer.forward(2 * x - x.detach(), *rest)

    layer._compiled_call_impl = broken
    assert judged() == {"delta": True, "attention": False, "ngram": True, "head": True}
    small.leave_uncompiled("attention")
    assert all(judged().values())


def test_orthogonalising_does_not_mind_how_far_a_gradient_was_clipped() -> None:
    g = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1))
    small, large = orthogonalise(g * 2.0**-40), orthogonalise(g)
    assert torch.equal(small, large)
