"""Rounds on an emulated card: near the CPU's, the same bits wherever experts lie, however rows are cut into windows."""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.engine.dense_block import DensePlacer, take_block, tensors_of
from strata.engine.device_rounds import DeviceRounds, RoundGivenUp
from strata.engine.models import open_model
from strata.engine.round_profile import CARD_LANE, profile_prompt, profile_rounds
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.engine.timeline import Timeline
from strata.errors import CheckpointError, EngineError
from strata.kernels.cpu.conductor import Conductor
from strata.kernels.cuda.mailbox import Mailbox
from strata.kernels.cuda.program import Address
from strata.kernels.host import CopyTiming, HostBackend, HostBuffer, HostFaults, HostRegistration
from strata.layers.ngram_hash import NgramHash
from tests.emulator.machine import EmulatedMachine
from tests.engine.conftest import VOCABULARY, load
from tests.engine.emulated_device import EmulatedDevice, device_runtime
from tests.models.oracle import sample_ids, worst

SHARED = ("box", "x", "tasks", "rows", "slots", "out", "flags")  # of the mailbox
PLACEMENTS = {
    "all in VRAM": {"expert_cache": 1000, "resident_experts": True},
    "CPU only": {"expert_cache": 0},
    "a few slots": {"expert_cache": 5, "adapt_every": 0},
    "link": {"expert_cache": 5, "adapt_every": 0, "pcie_frac": 1.0},
    "half the link": {"expert_cache": 5, "adapt_every": 0, "pcie_frac": 0.5},
    "a swap every round": {"expert_cache": 8, "resident_experts": True, "adapt_every": 1, "adapt_swaps": 2},
    "mapped": {"expert_cache": 5, "adapt_every": 0, "mmap_experts": True},
    "file": {"expert_cache": 5, "adapt_every": 0, "resident_budget_gib": 0.00005},
    "handed over by the host": {"expert_cache": 5, "adapt_every": 0, "mailbox": "off"},
}


def prompt(count: int, seed: int = 0) -> list[int]:
    return sample_ids(count, seed, VOCABULARY - 30)


def transcript(runtime: Runtime, ids: list[int], rounds: int = 6) -> torch.Tensor:
    """Logits of the prompt's last row and of greedy rounds after it."""
    session = Session(runtime)
    found = [session.read_prompt(ids)]
    for _ in range(rounds):
        token = int(found[-1].argmax())
        found.append(session.round([token])[0])
        session.commit(1, decoded=True)
    return torch.stack(found)


def test_a_card_gives_the_cpus_logits_within_rounding(packs: dict[str, Path]) -> None:
    """On FP32 dense weights: 8-bit ones take 16-bit activations on the CPU (decision 0071) and FP32 ones on a card."""
    ids = prompt(7)
    with load(packs["exact"], kv=32) as engine:
        expected = transcript(engine._runtime, ids, 3)
    with device_runtime(packs["exact"], kv=32, expert_cache=5) as runtime:
        found = transcript(runtime, ids, 3)
    errors = torch.tensor([worst(found[t], expected[t]) for t in range(len(found))])
    assert float(errors.max()) < 1e-4


def test_every_placement_gives_the_same_bits(packs: dict[str, Path]) -> None:
    ids, found = prompt(3, seed=1), {}
    for name, options in PLACEMENTS.items():
        with device_runtime(packs["default"], **options) as runtime:
            found[name] = transcript(runtime, ids, 3)
            counted = runtime.statistics().experts
            moved = {
                "all in VRAM": counted.misses == 0,
                "CPU only": counted.hits == 0,
                "a few slots": counted.hits and counted.misses_pinned and not counted.alias_picks,
                "link": counted.alias_picks == counted.misses_pinned > 0,
                "half the link": 0 < counted.alias_picks < counted.misses_pinned,
                "a swap every round": counted.swaps > 0,
                "mapped": counted.misses_mapped > 0,
                "file": counted.misses_file > 0,
                "handed over by the host": counted.hits and counted.misses_pinned and counted.handed_over,
            }
            assert moved[name], (name, counted)
            assert (counted.handed_over > 0) == (name == "handed over by the host")
    first = found.pop("all in VRAM")
    for name, other in found.items():
        assert torch.equal(first, other), name


def test_windows_prompts_and_rejected_rows_are_the_same_bits(packs: dict[str, Path]) -> None:
    ids = prompt(14, seed=2)
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        session = Session(runtime)
        rows = []
        for token in ids:
            rows.append(session.round([token])[0])
            session.commit(1)
        expected = torch.stack(rows)
        assert torch.equal(Session(runtime).read_prompt(ids), expected[-1])
        session, at = Session(runtime), 0
        for size, accepted in ((3, 3), (8, 2), (1, 1), (4, 0), (4, 4), (4, 4)):
            logits = session.round(ids[at : at + size])
            assert torch.equal(logits, expected[at : at + size])
            session.commit(accepted)
            at += accepted
        assert at == len(ids)


def test_the_order_of_blocks_and_threads_decides_nothing(packs: dict[str, Path]) -> None:
    ids, found = prompt(2, seed=3), []
    for backward in (False, True):
        with device_runtime(packs["default"], EmulatedDevice(backward=backward), expert_cache=5) as runtime:
            found.append(transcript(runtime, ids, 2))
    assert torch.equal(*found)


def test_a_plan_knows_what_rounds_share_with_the_host(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    allocate = HostBackend.allocate_pinned

    def counted(backend: HostBackend, nbytes: int) -> tuple[HostBuffer, HostRegistration]:
        taken.append(nbytes)
        return allocate(backend, nbytes)

    open_rounds = Runtime._open_rounds

    def opened(*given: object) -> DeviceRounds:
        monkeypatch.setattr(HostBackend, "allocate_pinned", counted)
        return open_rounds(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Runtime, "_open_rounds", opened)
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        assert runtime.plan.shape.mailbox_bytes == sum(taken) > 0


@pytest.mark.parametrize("copies", ["at_once", "threaded", "last_moment"])
@pytest.mark.parametrize("num_buffers", [0, 1, 3])
def test_dense_weights_lie_in_one_block_of_their_own_size(
    packs: dict[str, Path], num_buffers: int, copies: CopyTiming
) -> None:
    opened = open_model(str(packs["default"]))
    backend = HostBackend(1 << 20, HostFaults(copies=copies))
    held = [backend.allocate_pinned(4096)[0] for _ in range(num_buffers)]
    try:
        weights = opened.dense(None)
        block = take_block(opened.reader, EmulatedDevice())
        place = DensePlacer(block, backend, [buffer.address for buffer in held], 4096)
        moved = opened.dense_elsewhere(place)
        place.finish()
        blocks, sizes = set(), []
        for name, weight in weights.items():
            other = moved[name]
            assert type(other) is type(weight)
            for before, after in zip(tensors_of(weight), tensors_of(other), strict=True):
                assert torch.equal(before, after)
                assert before.dtype == after.dtype
                assert after.is_contiguous()
                assert after.data_ptr() % 16 == 0
                blocks.add(after.untyped_storage().data_ptr())
                sizes.append(after.nbytes)
        assert len(blocks) == 1
        assert after.untyped_storage().nbytes() < sum(sizes) + 512 * len(sizes)
    finally:
        backend.close()
        opened.close()


def test_a_mailbox_that_does_not_work_is_said_and_done_without(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(3, seed=1)
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        expected = transcript(runtime, ids, 3)
        effect = runtime.mailbox_effect()
        assert effect is not None
        assert effect.in_force
        assert "us an exchange" in effect.why
        assert runtime.statistics().mailbox_microseconds > 0
    begin = Conductor.begin

    def mute(conductor: Conductor, wait_ms: int = 10_000) -> None:
        conductor.plan_fault("abort", 1)
        begin(conductor, wait_ms)

    with monkeypatch.context() as patch:
        prepare = DeviceRounds.prepare

        def prepare_unheard(rounds: DeviceRounds) -> None:
            patch.setattr(Conductor, "begin", mute)
            prepare(rounds)
            patch.setattr(Conductor, "begin", begin)

        patch.setattr(DeviceRounds, "prepare", prepare_unheard)
        with device_runtime(packs["default"], expert_cache=5) as runtime:
            assert "does not work here (3 times no answer" in caplog.text
            effect = runtime.mailbox_effect()
            assert effect is not None
            assert not effect.in_force
            assert "no answer" in effect.why
            assert runtime.statistics().mailbox_microseconds == 0
            assert torch.equal(transcript(runtime, ids, 3), expected)
            assert runtime.statistics().experts.handed_over > 0
            with pytest.raises(EngineError, match="not timed"):
                runtime.rounds.time_launches([1])  # type: ignore[union-attr]


class Shadow:
    """What a card sees of the mailbox where nothing becomes visible while launches run: a copy, brought up to date when
    the host has waited for the card, and when the CPU has answered."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Mailbox, np.ndarray]] = []
        init, device = Mailbox.__init__, Mailbox.device
        synchronize, settle = EmulatedMachine.synchronize, Conductor.settle

        def make(mailbox: Mailbox, *given: Any) -> None:
            init(mailbox, *given)
            raw = np.zeros(mailbox.nbytes + 64, np.uint8)
            start = -raw.ctypes.data % 64
            self.made.append((mailbox, raw[start : start + mailbox.nbytes]))

        def see(mailbox: Mailbox, name: str) -> Address:
            if name not in SHARED:
                return device(mailbox, name)
            (shadow,) = [one for owner, one in self.made if owner is mailbox]
            return Address(shadow.ctypes.data + mailbox._offsets[name])

        def wait(machine: EmulatedMachine) -> None:
            synchronize(machine)
            for name in ("x", "tasks", "rows", "slots"):
                self.copy(name, to_host=True)
            self.copy("box", 128, to_host=True)
            self.copy("box", 0, 64, to_host=True)  # `posted` last

        def answer(conductor: Conductor, wait_ms: int) -> None:
            settle(conductor, wait_ms)
            for name in ("out", "flags"):
                self.copy(name, to_host=False)
            self.copy("box", 64, 128, to_host=False)

        patch.setattr(Mailbox, "__init__", make)
        patch.setattr(Mailbox, "device", see)
        patch.setattr(EmulatedMachine, "synchronize", wait)
        patch.setattr(Conductor, "settle", answer)

    def copy(self, name: str, begin: int = 0, end: int | None = None, *, to_host: bool) -> None:
        for mailbox, shadow in self.made:
            offsets = [*mailbox._offsets.values(), mailbox.nbytes]
            first = mailbox._offsets[name]
            size = offsets[offsets.index(first) + 1] - first
            part = slice(begin, size if end is None else end)
            host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(mailbox.host(name)))
            own = shadow[first : first + size]
            target, source = (host, own) if to_host else (own, host)
            target[part] = source[part]


def test_nothing_that_is_handed_over_waits_in_a_launch(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(3, seed=1)
    with device_runtime(packs["default"], expert_cache=5, adapt_every=0, pcie_frac=0.5) as runtime:
        expected = transcript(runtime, ids, 3)
    shadow = Shadow(monkeypatch)
    with device_runtime(packs["default"], expert_cache=5, adapt_every=0, pcie_frac=0.5, mailbox="off") as runtime:
        assert shadow.made
        assert runtime.rounds is not None
        runtime.rounds.limit_ms = 3000
        assert torch.equal(transcript(runtime, ids, 3), expected)
        assert runtime.statistics().experts.handed_over > 0


@pytest.mark.parametrize("kind", ["sleep", "die", "abort"])
def test_a_handed_over_round_that_is_given_up_is_repeated(packs: dict[str, Path], kind: str) -> None:
    ids = prompt(2, seed=4)
    with device_runtime(packs["default"], expert_cache=0, mailbox="off") as runtime:
        rounds = runtime.rounds
        assert rounds is not None
        expected = transcript(runtime, ids, 1)
        session = Session(runtime)
        token = int(session.read_prompt(ids).argmax())
        rounds.limit_ms = 4_000
        rounds.dispatch.conductor.plan_fault(kind, 1, 9_000)  # type: ignore[arg-type]
        began = time.monotonic()
        with pytest.raises(RoundGivenUp):
            session.round([token])
        assert time.monotonic() - began < 9, "it waits once"
        rounds.limit_ms = 60_000
        assert torch.equal(session.round([token])[0], expected[1])


@pytest.mark.parametrize("kind", ["sleep", "die", "abort"])
def test_a_round_that_is_given_up_is_repeated_from_the_same_state(packs: dict[str, Path], kind: str) -> None:
    ids = prompt(2, seed=4)
    with device_runtime(packs["default"], expert_cache=0) as runtime:
        rounds = runtime.rounds
        assert rounds is not None
        expected = transcript(runtime, ids, 1)
        layers = len(runtime.model._blocks)  # type: ignore[attr-defined]
        for exchange in (1, max(1, layers // 2), layers) if kind == "abort" else (layers,):
            session = Session(runtime)
            logits = session.read_prompt(ids)
            token = int(logits.argmax())
            rounds.limit_ms = 4_000  # more than an emulated round takes on a busy machine
            rounds.dispatch.conductor.plan_fault(kind, exchange, 9_000)  # type: ignore[arg-type]
            with pytest.raises(RoundGivenUp):
                session.round([token])
            rounds.limit_ms = 60_000
            assert torch.equal(session.round([token])[0], expected[1])
            session.commit(1)


def test_rows_that_cannot_be_gathered_end_the_round_and_it_is_repeated(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches before the gathered rows are read have run by then: the whole round must have, and nothing count."""
    ids = prompt(3, seed=5)
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        assert runtime.rounds is not None
        gathers = bool(runtime.rounds.state._ngram_rows)
        expected = transcript(runtime, ids, 1)
        session = Session(runtime)
        token = int(session.read_prompt(ids).argmax())

        def damaged(*_: object, **__: object) -> None:
            raise CheckpointError("row 7 is damaged")

        monkeypatch.setattr(NgramHash, "rows", damaged)
        for rows in (1, 3):
            with pytest.raises(CheckpointError, match="row 7") if gathers else nullcontext():
                session.round([token] * rows)
        monkeypatch.undo()
        assert torch.equal(session.round([token])[0], expected[1])


def test_best_ids_are_those_of_the_logits(packs: dict[str, Path]) -> None:
    ids = prompt(9, seed=6)
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        session = Session(runtime)
        for first, stop in ((0, 1), (1, 4), (4, 9)):
            logits = session.round(ids[first:stop])
            assert session.greedy_round(ids[first:stop]) == logits.argmax(-1).tolist()
            session.commit(stop - first, decoded=True)
        with pytest.raises(EngineError, match="wider"):
            session.greedy_round(ids)


def test_logits_are_kept_unless_they_are_lent(packs: dict[str, Path]) -> None:
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        session = Session(runtime)
        read, first = session.read_prompt([1, 2]), session.round([3])
        kept = read.clone(), first.clone()
        lent = session.round([3], lent=True)
        assert torch.equal(lent, first)
        other = session.round([4])
        assert not torch.equal(other, first)
        assert torch.equal(lent, other)
        assert torch.equal(read, kept[0])
        assert torch.equal(first, kept[1])


def test_a_largest_logit_that_is_not_finite_ends_a_greedy_round(packs: dict[str, Path]) -> None:
    """One weight of the head: of the two infinities one makes its logit the largest, the other the smallest."""
    with device_runtime(packs["exact"], expert_cache=5) as runtime:
        session, outcomes = Session(runtime), []
        expected = session.greedy_round([3])
        weight = runtime.model._head.data  # type: ignore[attr-defined]
        kept = weight.clone()
        for value in (torch.nan, torch.inf, -torch.inf):
            weight[5, 0] = value
            try:
                outcomes.append(session.greedy_round([3]) == expected)
            except EngineError as error:
                assert "row of position 0: the largest logit is not a finite number" in str(error)
                outcomes.append(False)
            weight.copy_(kept)
        assert sorted(outcomes[1:]) == [False, True]
        assert not outcomes[0]
        assert session.greedy_round([3]) == expected


def test_an_older_sequence_says_that_its_memory_is_gone(packs: dict[str, Path]) -> None:
    with device_runtime(packs["default"]) as runtime:
        old, new = Session(runtime), Session(runtime)
        with pytest.raises(EngineError, match="another sequence"):
            old.round([1])
        assert old.keep_prefix_of([1, 2]) == 0
        assert old.read_prompt([1, 2]) is not None
        with pytest.raises(EngineError, match="another sequence"):
            new.round([1])


def test_a_timed_round_names_every_launch_and_commits_nothing(packs: dict[str, Path]) -> None:
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        rounds, session = runtime.rounds, Session(runtime)
        assert rounds is not None
        expected = session.round([3])
        session.commit(0)
        timed = rounds.time_launches([3])
        assert [name for name, _ in timed] == [launch.kernel for launch in rounds.launches(1)]
        assert torch.equal(session.round([3]), expected)


def test_the_plan_counts_what_recorded_rounds_take(packs: dict[str, Path]) -> None:
    """Programs of any window use the same memory in turn; what they keep beside the state is the plan's, and little
    less."""
    ids = prompt(12, seed=7)
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        rounds, planned = runtime.rounds, runtime.plan.vram
        assert rounds is not None
        assert rounds.buffer_bytes <= planned["round buffers"] < 1.5 * rounds.buffer_bytes
        sequence = rounds.state.nbytes - rounds.state.record_bytes
        assert sequence == planned["state"] + planned["KV"]
        assert planned["prompt buffers"] > 0
        before, session = rounds.buffer_bytes, Session(runtime)
        expected = session.read_prompt(ids)
        for rows in (3, 5):  # recorded now, in the blocks of the widest
            session.round(ids[:rows])
        assert before <= rounds.buffer_bytes <= min(1.05 * before, planned["round buffers"])
        assert torch.equal(Session(runtime).read_prompt(ids), expected)


def test_a_prompt_and_a_round_are_taken_apart_by_launches(packs: dict[str, Path]) -> None:
    with device_runtime(packs["default"], expert_cache=5) as runtime:
        assert runtime.rounds is not None
        for profile, spans, kernels in (
            (
                lambda timeline: profile_prompt(runtime, prompt(11), timeline),
                ["window"] * 2,
                runtime.rounds.launches(8),
            ),
            (
                lambda timeline: profile_rounds(runtime, [3, 4, 5], 20, timeline),
                ["round"] * 3,
                runtime.rounds.launches(1),
            ),
        ):
            timeline = Timeline()
            profile(timeline)
            assert [one.name for one in timeline.spans if one.lane == "rounds"] == spans
            found = [one.name for one in timeline.spans if one.lane == CARD_LANE]
            assert found[0] == "round.begin"
            assert found[-1] == "round.publish"
            assert abs(len(found) - len(kernels)) < 8  # a prompt's window before the last has no head
