"""Prompts in chunks on an emulated card: bits that depend on nothing but the rows, near the CPU's and the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.engine import device_prompt, device_rounds, planning
from strata.engine.cancellation import Cancellation, Cancelled
from strata.engine.session import Session
from strata.experts import lender, system, taking
from strata.memory import planner
from tests.engine.conftest import VOCABULARY, load
from tests.engine.emulated_device import device_runtime
from tests.models.oracle import Pair, defined_ties, sample_ids


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 64 rows, and any prompt of more than 8 rows in chunks."""
    monkeypatch.setattr(device_prompt, "FRAME_ROWS", 64)
    monkeypatch.setattr(device_rounds, "SHORT_ROWS", 8)
    monkeypatch.setattr(planning, "SHORT_ROWS", 8)


def prompt(count: int, seed: int = 3) -> list[int]:
    return sample_ids(count, seed, VOCABULARY - 30)


def transcript(path: Path, ids: list[int], rounds: int = 3, **options: Any) -> torch.Tensor:
    with device_runtime(path, **options) as runtime:
        session = Session(runtime)
        found = [session.read_prompt(ids)]
        for _ in range(rounds):
            found.append(session.round([int(found[-1].argmax())])[0])
            session.commit(1, decoded=True)
        return torch.stack(found)


def test_logits_are_near_those_of_transformers(pair: Pair, packs: dict[str, Path]) -> None:
    ids = prompt(75)
    with torch.no_grad(), defined_ties():
        expected = pair.oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    found = transcript(packs["exact"], ids, 0, expert_cache=5)[0]
    assert float((found - expected).norm() / expected.norm()) < 0.02


CHUNKS: list[dict[str, Any]] = [{"prefill": rows} for rows in (32, 64, 512)]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in VRAM": {"expert_cache": 1000, "resident_experts": True},
    "one slot": {"expert_cache": 1},
    "a ring of three": {"expert_cache": 9, "prefill_ring": 3},
    "nothing page-locked": {"expert_cache": 5, "arena_pin_gib": "none"},
    "resident": {"expert_cache": 5, "resident_experts": True},
    "ring reserved": {"expert_cache": 5, "prefill_borrow": False},
    "mapped": {"expert_cache": 5, "mmap_experts": True},
    "file": {"expert_cache": 5, "resident_budget_gib": 0.0001},
    "no slots": {"expert_cache": 0},
}


@pytest.mark.slow
def test_neither_chunks_nor_placement_change_a_bit(packs: dict[str, Path]) -> None:
    ids = prompt(75)
    expected = transcript(packs["default"], ids, expert_cache=7, adapt_every=0)
    for options in (*CHUNKS, *PLACEMENTS.values()):
        found = transcript(packs["default"], ids, **{"adapt_every": 0, "expert_cache": 7, **options})
        assert torch.equal(found, expected), options


@pytest.mark.slow
def test_a_prompt_and_rounds_after_it_are_near_the_cpus(packs: dict[str, Path]) -> None:
    """Another arithmetic, so near: codes of activations on the CPU, BF16 on the card."""
    first, second = prompt(70), prompt(41, seed=9)

    def conversation(session: Session) -> torch.Tensor:
        found = [session.read_prompt(first)]
        for token in (7, 8, 9):
            found.append(session.round([token])[0].clone())
            session.commit(1, decoded=True)
        session.round([4, 5, 6])
        session.commit(2)  # rows that wait to be folded when the next prompt comes
        found.append(session.read_prompt(second))
        found += list(session.round([1, 2]).clone())
        return torch.stack(found)

    with load(packs["exact"]) as engine:
        expected = conversation(Session(engine._runtime))
    for prefill in (512, 24):  # 24: rounded up to 32
        with device_runtime(packs["exact"], expert_cache=5, prefill=prefill) as runtime:
            found = conversation(Session(runtime))
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.max()) < 0.02, error


def test_buffers_borrowed_from_slots_change_no_bit_and_are_given_back(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt takes the memory of the last slots, which loses what lay there; rounds after it find it again."""
    ids = prompt(75)
    options: dict[str, Any] = {"expert_cache": 9, "adapt_every": 1, "prefill_ring": 3}
    expected = transcript(packs["default"], ids, **options)
    for module in (planner, taking):
        monkeypatch.setattr(module, "LENT_PIECE", 4096)
    monkeypatch.setattr(planner, "_lends_buffers", lambda *_: True)
    for module in (planner, device_prompt):
        monkeypatch.setattr(module, "prompt_bytes", lambda *_: 5000)
    lost: list[int] = []
    lend = lender.SlotLender.lend

    def counted(own: lender.SlotLender, count: int, keep: set[int], nbytes: int = 0) -> list[int]:
        found = lend(own, count, keep, nbytes)
        lost.append(own.lent - len(found))
        return found

    monkeypatch.setattr(system.SlotLender, "lend", counted)
    with device_runtime(packs["default"], **options) as runtime:
        assert runtime.plan.lent_bytes == 5000
        assert "prompt buffers" not in runtime.plan.vram
        found = []
        for _ in range(2):
            session = Session(runtime)
            found.append([session.read_prompt(ids)])
            for _ in range(3):
                found[-1].append(session.round([int(found[-1][-1].argmax())])[0])
                session.commit(1, decoded=True)
        statistics = runtime.statistics().experts
    for one in found:
        assert torch.equal(torch.stack(one), expected)
    assert lost == [2 * 4096 // runtime.plan.stride + 2] * 2
    assert statistics.experts_in_vram == 9


def test_auto_cuts_a_prompt_into_chunks_of_one_length() -> None:
    for count, most, expected in (
        (32768, 34816, 32768), (40000, 34816, 20480), (34817, 34816, 18432), (700, 34816, 2048), (700, 512, 512),
        (262144, 34816, 32768),
    ):  # fmt: skip
        assert device_prompt.even_rows(count, most, 2048) == expected
        assert expected <= most


def test_a_cancelled_prompt_leaves_the_next_one_right(packs: dict[str, Path]) -> None:
    ids = prompt(50)
    with device_runtime(packs["default"], expert_cache=5, adapt_every=0) as runtime:
        session = Session(runtime)
        expected = session.read_prompt(ids)
        session.reset()
        cancellation = Cancellation()
        cancellation.cancel()  # seen at the first layer's experts, with copies under way
        with pytest.raises(Cancelled):
            session.read_prompt(ids, cancellation=cancellation)
        assert session.length == 0
        assert torch.equal(session.read_prompt(ids), expected)
        statistics = runtime.statistics().experts
        assert statistics.slots_lent == statistics.slots_refilled > 0
        assert statistics.ring_unused > 0
