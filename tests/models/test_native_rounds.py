"""Both families on the native operations: parity with the oracle, and the same bits whatever the window.

The experts here are the reference ones called row by row, so that every difference would be the models' or the
native operations'.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import ExpertExecutor
from tests.models.oracle import Pair, defined_ties, sample_ids, tiny_qwen3, tiny_qwen4, worst

LENGTH = 90


def row_by_row(pair: Pair) -> ExpertExecutor:
    def run(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = range(x.shape[0])
        return torch.cat([pair.experts(layer, *(one[t : t + 1].clone() for one in (x, ids, weights))) for t in rows])

    return run


def prompt() -> list[int]:
    ids = sample_ids(LENGTH)
    ids[40] = ids[42] = 5
    return ids


def decode(pair: Pair, size: Callable[[random.Random], int], *, certain: bool) -> torch.Tensor:
    """Logits of the prompt in windows of drawn sizes; a window that is not certain has up to three wrong rows more."""
    ids, ops, experts, choose = prompt(), CpuOps(), row_by_row(pair), random.Random(7)
    state, found = pair.model.new_state(LENGTH + 3), []
    with torch.no_grad():
        while state.length < LENGTH:
            count = min(size(choose), LENGTH - state.length)
            wrong = [] if certain else [choose.randrange(128) for _ in range(choose.randint(0, 3))]
            window = [*ids[state.length : state.length + count], *wrong]
            logits = pair.model.forward(ops, window, state, experts, certain=certain)
            assert logits is not None
            found.append(logits[:count].clone())
            state.commit(count)
    return torch.cat(found)


@pytest.fixture(params=[tiny_qwen3, tiny_qwen4], ids=["qwen3", "qwen4"], scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    made: Pair = request.param()
    return made


@pytest.fixture(scope="module")
def one_by_one(pair: Pair) -> torch.Tensor:
    return decode(pair, lambda _: 1, certain=True)


def test_native_logits_equal_oracle(pair: Pair, one_by_one: torch.Tensor) -> None:
    with defined_ties():
        assert worst(one_by_one, pair.oracle_logits(prompt())) < 2e-5


@pytest.mark.parametrize("certain", [False, True], ids=["windows", "chunks"])
@pytest.mark.parametrize("largest", [1, 8, 33])
def test_logits_are_the_same_bits_in_any_window(
    pair: Pair, one_by_one: torch.Tensor, largest: int, certain: bool
) -> None:
    found = decode(pair, lambda choose: choose.randint(1, largest), certain=certain)
    assert torch.equal(found, one_by_one)
