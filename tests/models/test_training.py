"""The training path: a batch equals its sequences, and gradients equal those that autograd finds in the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from strata.kernels.ops import Matrix
from strata.kernels.reference import ExpertWeights, ReferenceExperts, TrainingOps
from strata.models import find
from tests.models.oracle import Pair, defined_ties, load_weights, sample_ids, tiny_qwen3, tiny_qwen4, worst

SEQUENCES, LENGTH = 3, 34


def batch() -> list[list[int]]:
    rows = [sample_ids(LENGTH, seed) for seed in range(SEQUENCES)]
    rows[1][7] = rows[1][9] = 5  # a boundary inside one sequence only
    return rows


@pytest.fixture(params=["qwen3", "qwen4"], scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    return tiny_qwen3(num_hidden_layers=2) if request.param == "qwen3" else tiny_qwen4()


def trained(pair: Pair) -> tuple[Any, ReferenceExperts, dict[str, torch.Tensor]]:
    """A model over leaf tensors by the oracle's names."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
        for name, tensor in pair.oracle.state_dict().items()
    }
    raw = pair.oracle.config.to_dict() | {"architectures": [type(pair.oracle).__name__]}
    family = find(raw)
    config = family.read_config(raw)
    dense, experts = load_weights(family.weight_map(config), leaves)
    return family.build(config, dense), ReferenceExperts(experts), leaves


def test_batch_equals_oracle_sequence_by_sequence(pair: Pair) -> None:
    rows = batch()
    flat = [token for row in rows for token in row]
    ops, state = TrainingOps(SEQUENCES), pair.model.new_training_state(SEQUENCES)
    with torch.no_grad():
        found = pair.model.forward(ops, flat, state, pair.experts)
    assert found is not None
    with defined_ties():
        for row, logits in zip(rows, found.view(SEQUENCES, LENGTH, -1), strict=True):
            assert worst(logits, pair.oracle_logits(row)) < 2e-5


def test_gradients_equal_oracles(pair: Pair) -> None:
    ids = torch.tensor(batch())
    pair.oracle.zero_grad()
    with defined_ties():
        logits = pair.oracle(input_ids=ids, use_cache=False).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    model, experts, leaves = trained(pair)
    found = model.forward(TrainingOps(SEQUENCES), ids.flatten().tolist(), model.new_training_state(SEQUENCES), experts)
    found = found.view(SEQUENCES, LENGTH, -1)
    functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    compared = 0
    for name, parameter in pair.oracle.named_parameters():
        if parameter.grad is None:
            assert leaves[name].grad is None, name
            continue
        gradient = leaves[name].grad
        assert gradient is not None, name
        assert worst(gradient, parameter.grad) < 2e-3, name
        compared += 1
    assert compared > 20


def test_expert_weights_may_be_bf16_and_still_take_gradients() -> None:
    weights = ExpertWeights(
        torch.randn(4, 16, 8).bfloat16().requires_grad_(), torch.randn(4, 8, 8).bfloat16().requires_grad_()
    )
    ids = torch.tensor([[0, 2], [2, 1]], dtype=torch.int32)
    out = ReferenceExperts({0: weights})(0, torch.randn(2, 8), ids, torch.rand(2, 2))
    out.sum().backward()
    gradient = weights.gate_up_EOH.grad
    assert gradient is not None
    assert gradient[3].abs().max() == 0
    assert gradient[2].abs().max() > 0


def test_rows_must_be_whole_sequences(pair: Pair) -> None:
    state = pair.model.new_training_state(SEQUENCES)
    with pytest.raises(AssertionError, match="10 rows are not 3 sequences"):
        pair.model.forward(TrainingOps(SEQUENCES), [1] * 10, state, pair.experts)


def test_matrix_parameters_are_used_in_place() -> None:
    """A ``Matrix`` around a parameter is the parameter: an optimiser's step is seen by the next forward."""
    weight = torch.nn.Parameter(torch.eye(4))
    x = torch.ones(1, 4)
    ops = TrainingOps(1)
    before = ops.linear(x, Matrix("f32", weight, 4))
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(ops.linear(x, Matrix("f32", weight, 4)), before * 2)
