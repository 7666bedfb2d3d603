"""The trainer's batched model against the package's on the same weights, and its primitives against plain ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.kernels.reference import ReferenceExperts, ReferenceOps
from strata.kernels.reference.delta import recurrent_delta
from strata.models import find
from tests.models.oracle import load_weights
from tests.train.small_sizes import SMALL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

from checkpoint import published_name
from delta import gated_delta, unit_lower_inverse
from model import Config, TrainModel
from optimiser import orthogonalise


@pytest.fixture(scope="module")
def trained() -> TrainModel:
    """A model whose every weight matters: norms and convolutions moved from their start."""
    torch.set_num_threads(1)
    model = TrainModel(Config(**SMALL))
    model.initialise(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("conv1d.weight"):
                p.add_(torch.empty(p.shape).normal_(0.0, 0.2, generator=generator))
            elif not name.endswith(("A_log", "dt_bias")):
                p.mul_(3.0)
    return model


def package_model(trained: TrainModel) -> tuple[Any, ReferenceExperts]:
    raw = trained.c.hf_config()
    family = find(raw)
    config = family.read_config(raw)
    tensors = {published_name(name): p.detach() for name, p in trained.named_parameters()}
    dense, experts = load_weights(family.weight_map(config), tensors)
    return family.build(config, dense), ReferenceExperts(experts)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    found = torch.randint(0, 250, (2, 194), generator=torch.Generator().manual_seed(5))
    found[0, 60] = found[1, 7] = 250  # an end token: n-grams restart there
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


@torch.no_grad()
def test_the_trainers_sparse_logits_are_the_packages(trained: TrainModel, ids: torch.Tensor) -> None:
    """Past the index budget, where the package selects blocks, and for the draft block too."""
    model, experts = package_model(trained)
    x, _ = trained.hidden(ids[:, :192], torch.tensor([0]), sparse=True)
    y, _ = trained.drafted(x, ids[:, 1:193], torch.tensor([0]), sparse=True)
    logits, drafts = trained.logits(x), trained.logits(y, draft=True)
    for row in range(2):
        state, draft_state = model.new_state(192), model.mtp.new_state(192)
        streams = model.streams(ReferenceOps(), ids[row, :192].tolist(), state, experts, certain=True)
        assert relative(logits[row], model.head(ReferenceOps(), streams)) < 2e-5
        drafted, _ = model.mtp.forward(ReferenceOps(), ids[row, 1:193].tolist(), streams, draft_state, experts)
        assert relative(drafts[row], drafted) < 2e-5


@torch.no_grad()
def test_the_trainers_dense_logits_are_the_packages_with_no_budget(trained: TrainModel, ids: torch.Tensor) -> None:
    wide = TrainModel(Config(**SMALL | {"index_budget": 192}))
    wide.load_state_dict(trained.state_dict())
    model, experts = package_model(wide)
    logits = wide.logits(wide.hidden(ids[:, :192], torch.tensor([0]))[0])
    found = model.forward(ReferenceOps(), ids[1, :192].tolist(), model.new_state(192), experts, certain=True)
    assert relative(logits[1], found) < 2e-5


def test_every_parameter_learns(trained: TrainModel, ids: torch.Tensor) -> None:
    out = trained(ids, torch.arange(3, 192, 16), 0.3)
    out.loss.backward()
    silent = [name for name, p in trained.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
    assert float(out.balance) >= 1.0 - 1e-4
    trained.zero_grad()


def test_the_chunked_delta_rule_and_its_gradients_are_those_of_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 192)
    q = torch.nn.functional.normalize(torch.randn(*shape, 2, 16, generator=generator), dim=-1)
    k = torch.nn.functional.normalize(torch.randn(*shape, 2, 16, generator=generator) + 1.0, dim=-1)
    v = torch.randn(*shape, 4, 16, generator=generator)
    beta, g = torch.rand(*shape, 4, generator=generator), -0.2 * torch.rand(*shape, 4, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v, beta, g)]
    found, (expected, _) = gated_delta(*inputs), recurrent_delta(*inputs, torch.zeros(2, 4, 16, 16))
    assert expected is not None
    assert relative(found, expected) < 1e-5
    probe = torch.randn(found.shape, generator=generator)
    ours = torch.autograd.grad((found * probe).sum(), inputs)
    theirs = torch.autograd.grad((expected * probe).sum(), inputs)
    assert max(relative(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_the_inverse_is_stable_where_powers_would_overflow() -> None:
    """All keys equal and beta 1: powers of the matrix reach 1e17, its inverse is bidiagonal."""
    ones = torch.ones(1, 64, 64).tril(-1)
    found = unit_lower_inverse(ones)
    expected = torch.eye(64) - torch.diag(torch.ones(63), -1)
    assert torch.equal(found[0], expected)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    g = torch.randn(3, 32, 80, generator=torch.Generator().manual_seed(1))
    for stack in (g, g.mT):
        values = torch.linalg.svdvals(orthogonalise(stack))
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.4
