"""Whole models recorded and run on the emulated card: near the reference, the same bits in any window, few launches.

Experts are computed on the host between two parts of a round, row by row, so that differences are the row kernels'.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import RoundInputs
from strata.kvcache.device_state import DeviceState
from tests.emulator.machine import EmulatedMachine, EmulatedProgram
from tests.models.oracle import Pair, sample_ids, tiny_qwen3, tiny_qwen4

LENGTH = 30


class RecordedModel:
    """A pair's model in recorded rounds of up to 8 rows."""

    def __init__(self, pair: Pair, *, backward: bool = False) -> None:
        self._pair = pair
        self._machine = EmulatedMachine(backward=backward)
        self._inputs = RoundInputs.on(self._machine.device)
        self._pinned: list[ctypes.Array[ctypes.c_char]] = []
        self.state = DeviceState(pair.model.new_state(LENGTH + 8), self._inputs, self._take_pinned)  # type: ignore[arg-type]
        self._rounds: dict[int, tuple[list[Callable[[], object]], torch.Tensor, torch.Tensor]] = {}
        self.launches: dict[int, Counter[str]] = {}
        self._programs: dict[int, EmulatedProgram] = {}

    def _take_pinned(self, nbytes: int) -> tuple[int, int]:
        self._pinned.append(ctypes.create_string_buffer(nbytes))
        return (ctypes.addressof(self._pinned[-1]),) * 2

    def _record(self, rows: int) -> tuple[list[Callable[[], object]], torch.Tensor, torch.Tensor]:
        program, parts, counts = EmulatedProgram(), list[Callable[[], object]](), Counter[str]()
        ops = CudaOps(program, self._inputs)

        def cut() -> None:
            launches = program.take()
            counts.update(launch.kernel for launch in launches)
            parts.append(self._machine.prepare(launches).run)

        def experts(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            ops.settle()  # what an experts' launch takes into itself
            y = program.empty(*x.shape)

            def compute() -> None:
                self._machine.synchronize()
                for t in range(rows):
                    row = slice(t, t + 1)
                    y[row] = self._pair.experts(layer, x[row].clone(), ids[row].clone(), weights[row].clone())

            cut()
            parts.append(compute)
            return y

        state = self.state.record(program, rows)
        logits = self._pair.model.forward(ops, [0] * rows, state, experts)  # type: ignore[arg-type]
        assert logits is not None
        best = ops.argmax_rows(logits)
        cut()
        parts.append(self._machine.synchronize)
        self._programs[rows] = program
        self.launches[rows] = counts
        return parts, logits, best

    def round(self, ids: list[int]) -> torch.Tensor:
        """Logits of a window; ``state.commit`` follows."""
        if len(ids) not in self._rounds:
            self._rounds[len(ids)] = self._record(len(ids))
        parts, logits, best = self._rounds[len(ids)]
        self.state.begin(ids)
        self.state.gather(ids)
        self._inputs.ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._inputs.position[0], self._inputs.accepted[0] = self.state.length, self.state.accepted
        self._inputs.turn[0] = self.state.turn
        for part in parts:
            part()
        self.state.folded()
        assert best.tolist() == logits.argmax(-1).tolist()
        return logits.clone()

    def check_guards(self) -> None:
        for program in self._programs.values():
            program.check_guards()


@pytest.fixture(params=[tiny_qwen3, tiny_qwen4], ids=["qwen3", "qwen4"], scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    made: Pair = request.param()
    return made


def prompt() -> list[int]:
    ids = sample_ids(LENGTH)
    ids[12] = 5  # n-grams start again
    return ids


def decode(model: RecordedModel, windows: list[tuple[int, int]]) -> torch.Tensor:
    """Logits of the prompt in windows of (accepted, rejected) rows; rejected ones are wrong tokens."""
    ids, found = prompt(), []
    for accepted, rejected in windows:
        at = model.state.length
        found.append(model.round([*ids[at : at + accepted], *[7] * rejected])[:accepted])
        model.state.commit(accepted)
    model.check_guards()
    return torch.cat(found)


@pytest.fixture(scope="module")
def one_by_one(pair: Pair) -> torch.Tensor:
    return decode(RecordedModel(pair), [(1, 0)] * LENGTH)


def test_logits_are_the_reference_models(pair: Pair, one_by_one: torch.Tensor) -> None:
    with torch.no_grad():
        expected = pair.logits(prompt(), [1])
    error = (one_by_one - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 2e-5, error


def test_windows_and_rejected_rows_change_no_bit(pair: Pair, one_by_one: torch.Tensor) -> None:
    model = RecordedModel(pair, backward=True)
    found = decode(model, [(8, 0), (3, 2), (1, 7), (5, 0), (0, 4), (8, 0), (5, 3)])
    assert len(found) == LENGTH
    assert torch.equal(found, one_by_one)


def test_a_sequence_can_start_again(pair: Pair, one_by_one: torch.Tensor) -> None:
    model = RecordedModel(pair)
    decode(model, [(8, 0), (4, 0)])
    model.state.reset()
    assert torch.equal(decode(model, [(4, 4), (8, 0)]), one_by_one[:12])


# What a layer takes besides its experts and what the state's own kernels do.
ATTENTION = {"linear.linears": 2, "heads.take_rows": 1, "attention.attend_f32": 1, "attention.attend_combine": 1}
INDEX = {"index.score_blocks": 1}  # its query is projected with the keys
DELTA = {"linear.linears": 2, "delta_step.delta_step": 1, "delta.gated_norm": 1}  # the step norms heads of 128
MIXERS = {"streams.mix_down": 2, "streams.mix_up": 2}


def launches(pair: Pair) -> tuple[Counter[str], object]:
    model = RecordedModel(pair)
    model.round([1])
    found: Counter[str] = Counter()
    for name, count in model.launches[1].items():
        found[re.sub(r"(_any|_bf16|_q8_0)?_\d+(x\d+)?(_any)?$", "", name)] += count
    return Counter({name: count for name, count in found.items() if not name.startswith("state.")}), pair.model


def test_launches_of_a_layer() -> None:
    found, model = launches(tiny_qwen3())
    layers = model.config.num_layers  # type: ignore[attr-defined]
    layer = Counter(ATTENTION) + Counter({"pointwise.rms_norm": 2, "linear.linears": 1, "pointwise.router": 1})
    expected = Counter({name: count * layers for name, count in layer.items()})
    once = {"linear.embedding": 1, "pointwise.rms_norm": 1, "linear.linears": 1}
    ends = Counter({"pointwise.argmax_parts": 1, "pointwise.argmax_rows": 1})
    assert found == expected + Counter(once) + ends

    found, model = launches(tiny_qwen4())
    kinds = Counter(model.config.layer_kinds)  # type: ignore[attr-defined]
    blocks = len(model.config.ngram.blocks)  # type: ignore[attr-defined]
    # The layer before an n-gram embedding ends in sums that no mix reads first.
    ngram = {"linear.linears": 1, "streams.ngram_gate": 1, "delta.causal_conv": 1}
    ngram |= {"pointwise.sigmoid_scale": 1, "streams.hyper_add": 1}
    every = Counter(MIXERS) + Counter({"linear.linears": 2, "pointwise.router": 1})
    expected = Counter()
    for part, times in (
        (every, kinds.total()),
        (Counter(DELTA), kinds["linear"]),
        (Counter(ATTENTION) + Counter(INDEX), kinds["attention"]),
        (Counter(ngram), blocks),
        (Counter({"linear.embedding": 1, "pointwise.start_streams": 1, "linear.linears": 1}), 1),
        (
            Counter(
                {
                    "streams.mix_down": 1,
                    "streams.mix_up": 1,
                }
            ),
            1,
        ),
        (ends, 1),
    ):
        expected.update({name: count * times for name, count in part.items()})
    assert found == expected, (found - expected, expected - found)
