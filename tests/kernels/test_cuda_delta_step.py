"""A recorded layer of the gated delta net in one launch, from what a round keeps to what the next one reads.

The law: the same bits as its operations one by one, with tail, pending rows and state moved on by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.recorder import Ahead
from strata.kernels.cuda.records import DeltaRecord, TailRecord
from strata.kernels.ops import DeltaRows, DeltaWeights
from tests.kernels.cuda_runs import Run, equal, noise, random_matrix
from tests.kernels.cuda_runs import run as run_op

Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [(1, 1, 4, 3, 4), (2, 6, 32, 33, 2), (1, 3, 128, 40, 4), (2, 2, 130, 64, 5), (1, 1, 256, 32, 6)]
HEADS: list[Shape] = [(1, 1, 128, 128, 4), (2, 6, 128, 128, 4)]  # a block a value head
ROUNDS = [(1, 1), (1, 1), (4, 2), (8, 8), (3, 0), (3, 3), (8, 1), (1, 0), (2, 2)]  # rows, and how many are accepted


@dataclass
class Window:
    """What one round of a layer reads."""

    qkv_TC: torch.Tensor
    b_TN: torch.Tensor
    a_TN: torch.Tensor


@dataclass
class Norm:
    """What the gated norm of a round reads."""

    z_TNV: torch.Tensor
    weight_V: torch.Tensor
    gate: Literal["sigmoid", "silu"]


def weights_of(shape: Shape) -> DeltaWeights:
    keys, heads, key_width, width, taps = shape
    channels = 2 * keys * key_width + heads * width
    return DeltaWeights(noise(channels, taps), noise(heads), noise(heads, seed=3), keys, heads, key_width, width)


def window(weights: DeltaWeights, rows: int, seed: int) -> Window:
    heads = weights.value_heads
    return Window(
        noise(rows, weights.conv_CW.shape[0], seed=seed), noise(rows, heads, seed=seed), noise(rows, heads, seed=-seed)
    )


class Separate:
    """A layer by single operations."""

    def __init__(self, weights: DeltaWeights, state: torch.Tensor, tail: torch.Tensor) -> None:
        self.weights, self.state, self.tail = weights, state.clone(), tail.clone()
        self.accepted = 0
        keys, heads, key_width, width = weights.key_heads, weights.value_heads, weights.key_width, weights.value_width
        sizes = ((keys, key_width), (heads, width), (heads,), (heads,))
        self.pending = DeltaRows(*(torch.full((MAX_WINDOW, *size), torch.nan) for size in sizes))
        self._rows = torch.empty(0)

    def round(self, one: Window) -> torch.Tensor:
        run = Run.new().set(accepted=self.accepted)
        q, made = run.ops.delta_inputs(one.qkv_TC, self.tail, one.b_TN, one.a_TN, self.weights)
        out = run.ops.gated_delta(q, made, self.state, self.pending, write=False)
        run.go()
        for kept, new in zip(vars(self.pending).values(), vars(made).values(), strict=True):
            kept[: len(new)] = new
        self._rows, self.accepted = one.qkv_TC, 0
        return out

    def commit(self, accepted: int) -> None:
        self.accepted = accepted
        if accepted:
            self.tail = torch.cat((self.tail, self._rows[:accepted]))[-self.tail.shape[0] :]


class Kept:
    """The same in one launch a round."""

    def __init__(
        self, weights: DeltaWeights, state: torch.Tensor, tail: torch.Tensor, *, backward: bool = False
    ) -> None:
        self.weights, self.state = weights, state.clone()
        self.record = DeltaRecord.zeros(TailRecord.zeros(len(tail), tail.shape[1], tail.device), state)
        self.record.tail.rows_SRC[1] = torch.nan  # the round before has written copy 0
        self.record.tail.stand_in_UC.copy_(tail)
        self.accepted = self.turn = 0
        self._backward = backward

    def round(self, one: Window, late: tuple[int, int] | None = None, norm: Norm | None = None) -> torch.Tensor:
        """``late``: what accepted and turn seem to be before the launch before is complete."""
        run = Run.new(backward=self._backward).set(accepted=self.accepted)
        run.inputs.turn[0] = self.turn
        run.program.tails[self.record.tail.stand_in_UC.data_ptr()] = self.record.tail
        run.program.deltas[self.state.data_ptr()] = self.record
        if late is not None:
            run.machine.late = list(zip((run.inputs.accepted, run.inputs.turn), late, strict=True))
        tail = self.record.tail.stand_in_UC
        q, made = run.ops.delta_inputs(one.qkv_TC, tail, one.b_TN, one.a_TN, self.weights)
        out = run.ops.gated_delta(q, made, self.state, None, write=False)
        if norm is not None:
            out = run.ops.gated_norm(out, norm.z_TNV, norm.weight_V, 1e-6, norm.gate)
        run.ops.settle()
        assert [launch.kernel.rpartition("_")[0] for launch in run.program.launches] == ["delta_step.delta_step"]
        run.go()
        self.accepted, self.turn = 0, 1 - self.turn
        return out

    def commit(self, accepted: int) -> None:
        self.accepted = accepted


def both(shape: Shape, *, backward: bool = False) -> tuple[Separate, Kept, DeltaWeights]:
    weights = weights_of(shape)
    _, heads, key_width, width, taps = shape
    state, tail = noise(heads, key_width, width), noise(taps - 1, weights.conv_CW.shape[0])
    return Separate(weights, state, tail), Kept(weights, state, tail, backward=backward), weights


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *HEADS])
def test_one_launch_gives_the_bits_of_its_parts(shape: Shape, backward: bool) -> None:
    separate, kept, weights = both(shape, backward=backward)
    for number, (rows, accepted) in enumerate(ROUNDS):
        one = window(weights, rows, number)
        assert equal(kept.round(one), separate.round(one)), f"round {number}"
        assert equal(kept.state, separate.state), f"the fold of round {number}"
        kept.commit(accepted)
        separate.commit(accepted)


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_a_step_of_whole_heads_norms_its_result(gate: Literal["sigmoid", "silu"]) -> None:
    shape = HEADS[1]
    separate, kept, weights = both(shape)
    for number, (rows, accepted) in enumerate([*ROUNDS[1:5], (5, 5), (6, 1), (7, 7), (1, 1)]):
        one = window(weights, rows, number)
        norm = Norm(noise(rows, 6, 128, seed=number), noise(128), gate)
        o = separate.round(one)
        expected = run_op(lambda ops: ops.gated_norm(o, norm.z_TNV, norm.weight_V, 1e-6, gate))  # noqa: B023 - at once
        assert equal(kept.round(one, norm=norm), expected), f"round {number}"
        assert equal(kept.state, separate.state)
        kept.commit(accepted)
        separate.commit(accepted)


def test_the_product_that_follows_reads_plain_rows_and_is_brought_by_the_step() -> None:
    _, kept, weights = both(HEADS[0])
    run = Run.new()
    run.program.tails[kept.record.tail.stand_in_UC.data_ptr()] = kept.record.tail
    run.program.deltas[kept.state.data_ptr()] = kept.record
    one, output = window(weights, 2, 0), random_matrix(6, 128, "bf16")
    q, made = run.ops.delta_inputs(one.qkv_TC, kept.record.tail.stand_in_UC, one.b_TN, one.a_TN, weights)
    o = run.ops.gated_delta(q, made, kept.state, None, write=False)
    y = run.ops.gated_norm(o, noise(2, 1, 128), noise(128), 1e-6, "silu")
    found = run.ops.linear(y.flatten(1), output)
    step, product = run.program.launches
    assert (step.kernel, product.kernel) == ("delta_step.delta_step_head", "linear.linears_2x2")
    ahead = step.arguments[-1]
    assert isinstance(ahead, Ahead)
    assert (ahead.at[0], ahead.bytes[0]) == (output.data.data_ptr(), output.data.nbytes)
    run.go()
    torch.testing.assert_close(found, y.flatten(1) @ output.data.float().T)


@pytest.mark.parametrize("shape", [(2, 4, 32, 33, 4), HEADS[1]])
@pytest.mark.parametrize("rounds_lost", [1, 2, 3])
def test_rounds_that_were_given_up_are_repeated_from_the_same_state(rounds_lost: int, shape: Shape) -> None:
    """A round that is given up folds, and leaves rows that nobody accepts, whatever they hold."""
    separate, kept, weights = both(shape)
    for number, (rows, accepted) in enumerate([(2, 2), (8, 5), (1, 1), (3, 2)]):
        one = window(weights, rows, number)
        for lost in range(rounds_lost):
            broken = window(weights, (rows + lost) % MAX_WINDOW + 1, 50 + lost)
            broken.qkv_TC[:] = torch.nan
            kept.round(broken)
        assert equal(kept.round(one), separate.round(one))
        kept.commit(accepted)
        separate.commit(accepted)


@pytest.mark.parametrize("late", [(0, 0), (8, 0), (3, 1), (-5, 1), (1 << 30, 0x7FFFFFFF)])
@pytest.mark.parametrize("shape", [(2, 4, 32, 33, 4), HEADS[1]])
def test_words_that_come_late_are_waited_for(late: tuple[int, int], shape: Shape) -> None:
    separate, kept, weights = both(shape)
    for number, (rows, accepted) in enumerate([(3, 2), (1, 1), (8, 0), (2, 2)]):
        one = window(weights, rows, number)
        assert equal(kept.round(one, late), separate.round(one))
        assert equal(kept.state, separate.state)
        kept.commit(accepted)
        separate.commit(accepted)


def test_it_takes_the_inputs_made_just_before_it() -> None:
    _, kept, weights = both((1, 1, 4, 3, 4))
    run = Run.new()
    run.program.deltas[kept.state.data_ptr()] = kept.record
    one = window(weights, 1, 0)
    q, made = run.ops.delta_inputs(one.qkv_TC, noise(3, one.qkv_TC.shape[1]), one.b_TN, one.a_TN, weights)
    with pytest.raises(EngineError, match="gated_delta tail"):
        run.ops.gated_delta(q, made, kept.state, None, write=False)
    with pytest.raises(EngineError, match="just before it"):
        run.ops.gated_delta(q, made, kept.state, None, write=False)


@pytest.mark.parametrize(("taps", "dilation"), [(2, 1), (4, 3), (6, 2)])
@pytest.mark.parametrize("backward", [False, True])
def test_a_kept_convolution_is_moved_on_and_added_to(taps: int, dilation: int, backward: bool) -> None:
    channels, tail_rows = 70, (taps - 1) * dilation
    weight, tail, turn, accepted = noise(channels, taps), noise(tail_rows, channels), 0, 0
    record = TailRecord.zeros(tail_rows, channels, torch.device("cpu"))
    record.stand_in_UC.copy_(tail)
    for number, (rows, kept) in enumerate(ROUNDS):
        x, first, second = (noise(rows, channels, seed=number + 10 * i) for i in range(3))
        expected = run_op(lambda ops: ops.causal_conv(x, tail, weight, dilation))  # noqa: B023 - runs at once
        run = Run.new(backward=backward).set(accepted=accepted)
        run.inputs.turn[0] = turn
        run.program.tails[record.stand_in_UC.data_ptr()] = record
        found = run.ops.causal_conv(x, record.stand_in_UC, weight, dilation)
        for added in (first, second)[: number % 3]:
            found, expected = run.ops.add(added, found), added + expected
        run.ops.settle()
        assert [launch.kernel for launch in run.program.launches] == ["delta.causal_conv"]
        run.go()
        assert equal(found, expected), f"round {number}"
        tail, turn, accepted = torch.cat((tail, x[:kept]))[kept:], 1 - turn, kept
