"""How bytes move: runs of neighbours, the two steps of a swap, lending, the ring's promise of one copy an expert."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from strata.experts.policy import Swap
from strata.experts.ring import PromptRing
from strata.experts.system import ExpertSystem
from strata.experts.tiers import Tier
from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.cpu.stager import Stager
from strata.kernels.host import HostBackend, HostFaults
from strata.memory.requests import PinRequest
from tests.experts.small_model import Opened, SmallPack, draw_picks, make_plan, open_system

Small = tuple[SmallPack, ExpertKernel]
NEVER = 10**9


def slot_bytes(opened: Opened, slot: int) -> int:
    store = opened.system.store
    return checksum_at(store.slots.slot_address(slot), opened.pack.blob_bytes)


def test_neighbours_go_in_one_copy(small: Small) -> None:
    pack, kernel = small
    opened = open_system(pack, kernel, expert_cache=8)
    slots = opened.system.store.slots
    for slot in range(8):
        slots.evict(slot)
    before = opened.backend.statistics()
    moves = opened.system.mover.load([3, 4, 5, 9, 11, 12], [slots.slot_address(slot) for slot in (0, 1, 2, 3, 5, 7)])
    for move in moves:
        opened.system.mover.wait(move)
    after = opened.backend.statistics()
    assert after.num_copies - before.num_copies == 4  # 3-5, 9, 11, and 12 whose target is no neighbour
    assert [slot_bytes(opened, slot) for slot in (0, 1, 2, 3, 5, 7)] == [
        int(pack.checksums.ravel()[expert]) for expert in (3, 4, 5, 9, 11, 12)
    ]
    opened.close()


def test_moves_may_be_waited_for_in_any_order(small: Small) -> None:
    """The last of six staged moves through two buffers: each buffer is taken again only after its copy."""
    pack, kernel = small
    late = HostFaults(refuse_one_allocation=True, refuse_at_slice=0, copies="last_moment", late_queries=9)
    opened = open_system(pack, kernel, late, mode="resident", expert_cache=6, stager_buffers=2)
    slots = opened.system.store.slots
    for slot in range(6):
        slots.evict(slot)
    experts = [20, 3, 9, 11, 18, 7]
    moves = opened.system.mover.load(experts, [slots.slot_address(slot) for slot in range(6)])
    for move in moves[::-1]:
        opened.system.mover.wait(move)
    sums = [int(pack.checksums.ravel()[expert]) for expert in experts]
    assert [slot_bytes(opened, slot) for slot in range(6)] == sums
    assert opened.system.statistics().buffer_waits > 0
    opened.close()


def test_an_interruption_of_the_wait_after_an_interruption_leaves_no_job_behind(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while slots are filled, and again while that is waited for; then everything is closed."""
    pack, kernel = small
    refused = HostFaults(refuse_one_allocation=True, refuse_at_slice=0)
    opened = open_system(pack, kernel, refused, mode="resident", expert_cache=6)
    mover, slots, loader, presses = opened.system.mover, opened.system.store.slots, Stager(2), 2
    for slot in range(6):
        slots.evict(slot)
    wait = Stager.wait

    def interrupted(stager: Stager, ticket: int) -> None:
        nonlocal presses
        if stager is loader and presses:
            presses -= 1
            raise KeyboardInterrupt
        wait(stager, ticket)

    def fill() -> None:
        with mover.staged_by(loader):
            for move in mover.load([20, 3, 9, 11, 18, 7], [slots.slot_address(slot) for slot in range(6)]):
                mover.wait(move)

    monkeypatch.setattr(Stager, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill()
    assert presses == 0
    mover.drain()  # as closing does: with its own threads, of nothing
    opened.close()


def test_bytes_on_their_way_to_ordinary_ram_are_there_when_the_thread_is_through(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that takes long to empty the buffer: the move has not ended, and its buffer is nobody else's."""
    pack, kernel = small
    nowhere = HostFaults(refuse_one_allocation=True, refuse_at_slice=0)
    opened = open_system(pack, kernel, nowhere, mode="resident", expert_cache=6, stager_buffers=2)
    mover, store = opened.system.mover, opened.system.store
    place = int(np.flatnonzero(store.place_owner >= 0)[0])
    store.take_place(int(store.place_owner[place]))
    stager, put_off = mover._stager, []
    with monkeypatch.context() as patch:
        patch.setattr(stager, "copy", lambda *copy: put_off.append(copy) or 0)
        patch.setattr(stager, "query", lambda _: False)
        move = mover.save(int(store.slots.owner[0]), store.slots.slot_address(0), place)
        assert not any(mover.has_ended(move) for _ in range(20))
        assert len(put_off) == 1
        assert move.buffer not in mover.buffers._free
    move.ticket = stager.copy(*put_off[0])
    mover.wait(move)
    assert checksum_at(store.place_address(place), pack.blob_bytes) == slot_bytes(opened, 0)
    opened.close()


def test_a_swap_is_published_in_two_steps(small: Small) -> None:
    """Promoted and victim both lie in VRAM in between; a round of the old version delays the second step."""
    pack, kernel = small
    changes: dict[str, object] = {"expert_cache": 6, "ring_slots": 2, "adapt_every": NEVER, "adapt_swaps": 1}
    opened = open_system(pack, kernel, mode="resident", **changes)
    system, store = opened.system, opened.system.store
    swap = Swap(promoted=2, victim=0)
    spare = int(system.swaps.spares[0])
    old_round = system.begin_round()
    assert system.swaps.start(swap)
    assert store.locate(0, 2).tier is Tier.PINNED
    place = store.locate(0, 2).place
    version = store.version
    system.end_round(system.begin_round())  # the copy is complete: step one
    assert store.version == version + 1
    assert store.locate(0, 2).tier is store.locate(0, 0).tier is Tier.VRAM
    assert store.locate(0, 2).slot == spare
    system.end_round(system.begin_round())  # the old round still runs: no step two
    assert store.locate(0, 0).tier is Tier.VRAM
    assert checksum_at(store.place_address(place), pack.blob_bytes) == int(pack.checksums[0, 2])
    system.end_round(old_round)
    system.end_round(system.begin_round())
    assert store.version == version + 2
    assert store.locate(0, 0).tier is Tier.PINNED
    assert store.locate(0, 0).place == place
    assert checksum_at(store.place_address(place), pack.blob_bytes) == int(pack.checksums[0, 0])
    assert system.swaps.spares == [0]
    assert system.statistics().swaps_copied_back == 1
    opened.close()


def test_a_swap_in_the_arena_copies_nothing_back(small: Small) -> None:
    pack, kernel = small
    opened = open_system(pack, kernel, adapt_every=NEVER, adapt_swaps=1)
    assert opened.system.swaps.start(Swap(promoted=2, victim=0))
    assert not opened.system.swaps.start(Swap(promoted=10, victim=8))  # the one spare slot is taken
    opened.system.swaps.finish()
    assert opened.system.statistics().saved_bytes == 0
    assert opened.system.store.in_vram().ravel()[[0, 2]].tolist() == [False, True]
    opened.close()


def test_a_prompt_borrows_no_more_than_it_needs_and_fills_up_again(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    pack, kernel = small
    caplog.set_level(logging.INFO, "strata")
    opened = open_system(pack, kernel, mode="resident", expert_cache=23, adapt_every=0)
    before = opened.system.store.slots.owner.copy()
    opened.forward(1, 70)
    assert "the prompt borrows 16 slots (192.0 KiB)" in caplog.text  # two layers' experts
    assert np.count_nonzero(opened.system.store.slots.owner >= 0) == 23 - 16
    opened.forward(2, 1)  # the first round gives them back
    assert (opened.system.store.slots.owner == before).all()
    assert opened.system.statistics().slots_refilled == 16
    for slot, expert in enumerate(before.tolist()):
        assert slot_bytes(opened, slot) == int(pack.checksums.ravel()[expert])
    opened.close()


def test_lent_slots_are_those_with_a_copy_in_ram(small: Small) -> None:
    """Resident mode with room for one copy: its slot is lent first, the others come back from the file."""
    pack, kernel = small
    plan = make_plan(pack, mode="resident", expert_cache=12, ring_slots=3)
    tight = replace(plan, num_ram_experts=13)
    backend = HostBackend(1 << 28)
    opened = Opened(ExpertSystem.open(tight, pack, kernel, backend), backend, pack)
    copied = np.flatnonzero((opened.system.store.place_of >= 0) & (opened.system.store.slots.slot_of >= 0))
    assert len(copied) == 1
    opened.forward(1, 70)
    assert opened.system.store.slots.slot_of[copied[0]] == -1
    opened.system.end_prompt()
    assert opened.system.statistics().file_bytes > 0
    opened.close()


def test_the_next_layer_is_streamed_while_this_one_computes(small: Small) -> None:
    pack, kernel = small
    opened = open_system(pack, kernel, mode="resident", expert_cache=16, ring_slots=16, adapt_every=0)
    opened.forward(1, 600)
    statistics = opened.system.statistics()
    assert statistics.ring_loads == 24  # every expert of every layer once, though two layers were under way
    assert statistics.ring_unused == 0
    opened.close()


def test_what_was_streamed_ahead_for_nothing_is_counted_and_harmless(small: Small) -> None:
    pack, kernel = small
    opened = open_system(pack, kernel, mode="resident", expert_cache=16, ring_slots=16, adapt_every=0)
    system = opened.system
    opened.forward(1, 600)
    ring = system._ring
    assert ring is not None
    ring.want([20, 21, 22])
    opened.forward(2, 70)
    system.end_prompt()
    assert system.statistics().ring_unused == 3
    opened.close()


def test_a_prompt_that_is_abandoned_half_way_leaves_the_cache_whole(small: Small) -> None:
    """The next layer is on its way into borrowed slots when the request ends: it must not arrive after the refill."""
    pack, kernel = small
    late = HostFaults(refuse_one_allocation=True, refuse_at_slice=0, copies="last_moment", late_queries=3)
    opened = open_system(pack, kernel, late, mode="resident", expert_cache=16, ring_slots=16, stager_buffers=2)
    generator = torch.Generator().manual_seed(1)
    ids, weights = draw_picks(generator, 600, pack.num_experts)
    opened.system.dispatcher(0, torch.randn(600, 64, generator=generator), ids, weights)
    opened.system.end_prompt()
    owner = opened.system.store.slots.owner
    for slot in np.flatnonzero(owner >= 0).tolist():
        assert slot_bytes(opened, slot) == int(pack.checksums.ravel()[owner[slot]])
    opened.forward(2, 4)
    for slot in np.flatnonzero(owner >= 0).tolist():
        assert slot_bytes(opened, slot) == int(pack.checksums.ravel()[owner[slot]])
    assert opened.system.statistics().ring_unused > 0
    opened.close()


def test_what_was_queued_ahead_and_is_not_picked_is_never_loaded(small: Small) -> None:
    pack, kernel = small
    opened = open_system(pack, kernel, mode="resident", expert_cache=8, ring_slots=4, adapt_every=0)
    slots = opened.system.store.slots
    for slot in range(4):
        slots.evict(slot)
    ring = PromptRing(opened.system.mover, [slots.slot_address(slot) for slot in range(4)])
    ring.want(range(16, 24))  # four are under way, four wait
    arrived = [move.expert for batch in ring.take([17, 23]) for move in batch]
    assert arrived == [17, 23]
    ring.settle()
    assert (ring.num_loads, ring.num_unused) == (5, 3)
    opened.close()


@pytest.mark.parametrize(("pinned", "threads", "buffers"), [(True, 4, 16), (False, 4, 64)])
def test_one_line_says_how_prompts_are_fed(
    small: Small, caplog: pytest.LogCaptureFixture, pinned: bool, threads: int, buffers: int
) -> None:
    pack, kernel = small
    caplog.set_level(logging.INFO, "strata")
    faults = HostFaults() if pinned else HostFaults(refuse_one_allocation=True, refuse_at_slice=0)
    opened = open_system(pack, kernel, faults, mode="resident", stager_threads=None)
    share = 0 if pinned else 100
    lines = [line for line in caplog.messages if line.startswith("prompt stream:")]
    assert len(lines) == 1
    assert f"{share} % of the experts outside VRAM are not pinned, they come from RAM" in lines[0]
    assert f"{threads} threads, {buffers} buffers" in lines[0]
    opened.close()


@pytest.mark.parametrize(
    ("mode", "pin"),
    [
        ("arena", PinRequest(by_need=True)),
        ("arena", PinRequest("limit", limit_bytes=10 * 12_288)),
        ("resident", PinRequest("limit", limit_bytes=10 * 12_288)),
        ("arena", PinRequest("none")),
    ],
)
def test_the_unpinned_share_is_of_the_experts_outside_vram(
    small: Small, caplog: pytest.LogCaptureFixture, mode: str, pin: PinRequest
) -> None:
    pack, kernel = small
    caplog.set_level(logging.INFO, "strata")
    opened = open_system(pack, kernel, mode=mode, pin=pin, expert_cache=12, stager_threads=None)
    store = opened.system.store
    assert store.memory is not None
    tiers = [
        (store.slots.slot_of.reshape(-1)[flat] >= 0, place >= 0 and store.memory.aliases[place] != 0)
        for flat, place in enumerate(store.place_of.reshape(-1).tolist())
    ]
    outside = [is_pinned for in_vram, is_pinned in tiers if not in_vram]
    share = 100 * (1 - sum(outside) / len(outside))
    assert len(outside) == len(tiers) - 12
    assert f"prompt stream: {share:.0f} % of the experts" in caplog.text
    assert ("64 buffers" if share > 10 else "16 buffers") in caplog.text
    if pin.by_need:
        assert share == 0
    opened.close()


def test_a_machine_without_slots_is_told_nothing_of_streams_and_page_locks(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    pack, kernel = small
    caplog.set_level(logging.INFO, "strata")
    for mode in ("arena", "budget", "mapped"):
        opened = open_system(pack, kernel, mode=mode, expert_cache=0, budget_bytes=5 * pack.blob_bytes)
        opened.forward(1, 70)
        opened.close()
    assert caplog.text == ""
    opened = open_system(pack, kernel, expert_cache=1)
    opened.forward(1, 70)
    opened.close()
    assert "ring 1 slot " in caplog.text
    assert "borrows 1 slot " in caplog.text
