"""The planner's arithmetic against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.config import RamMode
from strata.errors import MemoryPlanError
from strata.memory.planner import GIB, MIB, ResolvedPlan, expert_stride, plan
from strata.memory.requests import (
    DeviceRoom,
    MemoryRequest,
    ModelShape,
    PinRequest,
    pin_arena,
    pin_complement,
)

BLOB = 2_764_800  # 675 whole pages
FLASH = ModelShape(
    name="flash-next",
    num_layers=48,
    num_experts=512,
    top_k=10,
    blob_bytes=BLOB,
    hidden=2560,
    dense_bytes=int(4.25 * GIB),
    state_bytes=112 * MIB,
    kv_bytes_per_token=24 * 1024,
)
CARD = DeviceRoom("cuda", 32 * GIB)


def test_an_expert_of_whole_pages_is_not_padded() -> None:
    assert expert_stride(BLOB) == BLOB
    assert expert_stride(BLOB - 1) == BLOB
    assert expert_stride(1000) == 1024  # padding a small expert to a page would cost 3/4 of it
    assert expert_stride(4096) == 4096


def test_the_released_model_on_a_32_gib_card_with_128_gib_of_ram() -> None:
    resolved = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), CARD)
    fixed = sum(resolved.vram[name] for name in ("dense weights", "state", "KV", "prompt buffers", "expert results"))
    assert resolved.mode == "arena"
    assert resolved.num_slots == (32 * GIB - 700 * MIB - fixed) // BLOB
    assert resolved.num_ram_experts == 24_576
    assert resolved.ring_slots == 384
    assert resolved.ring_borrowed
    assert resolved.vram_bytes <= 32 * GIB < resolved.vram_bytes + BLOB
    assert resolved.messages == ()


def test_resident_mode_holds_the_complement_and_copies_of_lendable_slots_as_ram_allows() -> None:
    request = MemoryRequest(ram_bytes=120 * GIB, mode="resident", expert_cache=7157)
    resolved = plan(FLASH, request, CARD)
    assert resolved.num_ram_experts == 24_576 - 7157 + 384
    tight = dataclasses.replace(request, ram_bytes=(24_576 - 7157 + 100) * BLOB + 4 * GIB + _other_ram(resolved))
    assert plan(FLASH, tight, CARD).num_ram_experts == 24_576 - 7157 + 100


def test_each_mode_gives_way_to_the_next_lower_one_with_the_numbers() -> None:
    resident = plan(FLASH, MemoryRequest(ram_bytes=60 * GIB), CARD)
    assert resident.mode == "resident"
    assert "RAM mode arena" in resident.messages[0]
    budget = plan(FLASH, MemoryRequest(ram_bytes=20 * GIB), CARD)
    assert budget.mode == "budget"
    assert budget.num_ram_experts == (20 * GIB - 4 * GIB - _other_ram(budget)) // BLOB
    mapped = plan(FLASH, MemoryRequest(ram_bytes=4 * GIB + _other_ram(budget) + BLOB - 1), CARD)
    assert mapped.mode == "mapped"
    assert mapped.num_ram_experts == 0
    with pytest.raises(MemoryPlanError, match="too few") as caught:
        plan(FLASH, MemoryRequest(ram_bytes=4 * GIB), CARD)
    assert caught.value.short_bytes == _other_ram(budget)


def test_a_budget_larger_than_free_ram_is_clamped_with_a_message() -> None:
    request = MemoryRequest(ram_bytes=20 * GIB, mode="budget", budget_bytes=40 * GIB)
    resolved = plan(FLASH, request, CARD)
    assert resolved.mode == "budget"
    assert resolved.ram_bytes <= 20 * GIB < resolved.ram_bytes + BLOB
    assert "--resident-budget-gib" in resolved.messages[0]
    small = plan(FLASH, dataclasses.replace(request, budget_bytes=2 * GIB), CARD)
    assert small.num_ram_experts == 2 * GIB // BLOB
    assert small.messages == ()


def test_a_cache_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, expert_cache=20_000), CARD)
    assert caught.value.short_bytes > 0
    largest = int(caught.value.hint.rsplit(" ", 1)[1].replace(",", ""))
    fits = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, expert_cache=largest), CARD)
    assert fits.num_slots == largest
    with pytest.raises(MemoryPlanError):
        plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, expert_cache=largest + 1), CARD)


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    request = MemoryRequest(ram_bytes=120 * GIB, max_context=262_144, num_sequences=1)
    small = DeviceRoom("cuda", 8 * GIB)
    with pytest.raises(MemoryPlanError, match="context") as caught:
        plan(FLASH, request, small)
    context = int(caught.value.hint.rsplit(" ", 1)[1])
    assert plan(FLASH, dataclasses.replace(request, max_context=context), small).num_slots >= 1


def test_a_tiny_card_is_told_to_read_prompts_in_smaller_chunks_first() -> None:
    """8,192 rows of buffers and results take 2 GiB here: fewer rows cost speed, a shorter context costs words."""
    request = MemoryRequest(ram_bytes=120 * GIB, max_context=16_384)
    tiny = DeviceRoom("cuda", 6 * GIB)
    with pytest.raises(MemoryPlanError) as caught:
        plan(FLASH, request, tiny)
    option, rows = caught.value.hint.rsplit(" ", 1)
    assert option == "use --prefill"
    taken = plan(FLASH, dataclasses.replace(request, chunk_rows=int(rows), pass_rows=int(rows)), tiny)
    assert taken.num_slots >= 1
    more = int(rows) + 256
    with pytest.raises(MemoryPlanError):
        plan(FLASH, dataclasses.replace(request, chunk_rows=more, pass_rows=more), tiny)


def test_a_card_too_small_for_the_dense_weights_is_refused_with_the_size_it_takes() -> None:
    with pytest.raises(MemoryPlanError, match="VRAM") as caught:
        plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), DeviceRoom("cuda", 3 * GIB))
    assert "its dense weights alone take 4.25 GiB" in caught.value.message
    size = float(caught.value.hint.split()[2])
    assert caught.value.hint == f"it takes {size:.2f} GiB of free VRAM or --device cpu"
    assert plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), DeviceRoom("cuda", int(size * GIB))).num_slots >= 1
    with pytest.raises(MemoryPlanError) as caught:
        plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), DeviceRoom("cuda", 3 * GIB, is_capped=True))
    assert caught.value.hint == f"it takes --vram-gib {size:.2f} or --device cpu"


def test_what_lies_on_a_card_is_not_charged_to_ram_as_well() -> None:
    resolved = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), CARD)
    assert resolved.vram["dense weights"] == FLASH.dense_bytes
    assert resolved.vram["reserve"] == 700 * MIB
    assert not {"dense weights", "state", "KV", "expert slots"} & set(resolved.ram)
    assert resolved.ram["device memory"] == 0


def test_reads_go_past_a_page_cache_that_holds_less_than_a_quarter_of_the_file() -> None:
    cpu = DeviceRoom("cpu", None)
    request = MemoryRequest(ram_bytes=120 * GIB, headroom_bytes=0, mode="budget", budget_bytes=0)
    taken = plan(FLASH, request, cpu).ram_bytes
    quarter = FLASH.total_experts * BLOB // 4
    assert not plan(FLASH, dataclasses.replace(request, ram_bytes=taken + quarter), cpu).direct_reads
    assert plan(FLASH, dataclasses.replace(request, ram_bytes=taken + quarter - 1), cpu).direct_reads


def test_a_plan_says_what_is_page_locked() -> None:
    def said(pin: PinRequest, device: DeviceRoom) -> str:
        return "\n".join(plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, pin=pin), device).lines())

    assert "in RAM, as much as is granted page-locked" in said(PinRequest(), CARD)
    assert "in RAM, at most 8.00 GiB page-locked" in said(PinRequest("limit", 8 * GIB), CARD)
    assert "in RAM, nothing page-locked" in said(PinRequest("none"), CARD)
    assert "page-locked" not in said(PinRequest(), DeviceRoom("cpu", None))


def test_a_ring_that_is_cut_is_said() -> None:
    room = DeviceRoom("cpu", 16 * GIB)
    cut = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, ring_slots=2000), room)
    assert (cut.ring_slots, cut.messages[0].split(": ")[1]) == (1024, "2,000 slots asked, 1,024 taken")
    few = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, ring_slots=900, expert_cache=100), room)
    assert (few.ring_slots, few.messages[0].split(": ")[2]) == (100, "the cache has no more to lend")
    assert not plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, ring_slots=900), room).messages


def test_what_a_card_shares_with_the_host_is_ram_and_counts_as_page_locked() -> None:
    shape = dataclasses.replace(FLASH, mailbox_bytes=9 * MIB)
    request = MemoryRequest(ram_bytes=120 * GIB, expert_cache=4000)
    room = DeviceRoom("cuda", 32 * GIB, pins_charge_device=True)
    without, resolved = (plan(one, request, room) for one in (FLASH, shape))
    assert resolved.ram["mailbox"] == 9 * MIB == resolved.ram_bytes - without.ram_bytes
    assert without.pin_limit is not None
    assert resolved.pin_limit == without.pin_limit - 9 * MIB
    assert plan(shape, request, DeviceRoom("cpu", None)).ram["mailbox"] == 0


def test_without_a_card_everything_is_charged_to_ram() -> None:
    resolved = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), DeviceRoom("cpu", None))
    assert resolved.num_slots == resolved.ring_slots == 0
    assert resolved.vram == {}
    assert resolved.ram["dense weights"] == FLASH.dense_bytes
    simulated = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), DeviceRoom("cpu", 8 * GIB))
    assert simulated.ram["device memory"] == simulated.vram_bytes <= 8 * GIB


def test_a_ring_that_is_not_borrowed_is_reserved_beside_the_cache() -> None:
    request = MemoryRequest(ram_bytes=120 * GIB, prefill_borrow=False)
    resolved = plan(FLASH, request, CARD)
    borrowed = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), CARD)
    assert resolved.vram["prefill ring"] == 384 * BLOB
    assert resolved.num_slots == borrowed.num_slots - 384
    wide = plan(FLASH, dataclasses.replace(request, ring_slots=672), CARD)
    assert wide.vram["prefill ring"] - resolved.vram["prefill ring"] == 288 * BLOB  # 0.74 GiB, as documented


def test_spare_slots_exist_only_where_experts_are_swapped() -> None:
    base = MemoryRequest(ram_bytes=120 * GIB)
    assert plan(FLASH, base, CARD).num_spares == 0
    assert plan(FLASH, dataclasses.replace(base, adapt_every=1, adapt_swaps=3), CARD).num_spares == 3


def test_the_smallest_room_of_several_cards_limits_page_locking() -> None:
    rooms = DeviceRoom("cuda", 32 * GIB, pin_rooms=(40 * GIB, 30 * GIB))
    resolved = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), rooms)
    assert resolved.pin_limit == 26 * GIB
    everything = MemoryRequest(ram_bytes=120 * GIB, pin=PinRequest(rule="all"))
    assert plan(FLASH, everything, rooms).pin_limit is None


def test_pins_that_count_as_device_memory_are_planned_with_it() -> None:
    room = DeviceRoom("cuda", 32 * GIB, pins_charge_device=True)
    resolved = plan(FLASH, MemoryRequest(ram_bytes=120 * GIB, expert_cache=4000), room)
    assert resolved.pin_limit is not None
    assert resolved.pin_limit + resolved.vram_bytes + resolved.ram["staging"] == 32 * GIB


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", PinRequest("all")),
        ("auto", PinRequest("auto")),
        (0.0, PinRequest("none")),
        (1.5, PinRequest("limit", 3 * GIB // 2)),
    ],
)
def test_zero_of_the_complement_pins_nothing(value: float | Literal["auto", "all"], expected: PinRequest) -> None:
    assert pin_complement(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("none", PinRequest("none")),
        ("auto", PinRequest("auto")),
        (0.0, PinRequest("all")),
        (8.0, PinRequest("limit", 8 * GIB)),
    ],
)
def test_zero_of_the_arena_pins_all_of_it(value: float | Literal["auto", "none"], expected: PinRequest) -> None:
    assert pin_arena(value) == expected


def _other_ram(resolved: ResolvedPlan) -> int:
    return resolved.ram_bytes - resolved.ram["expert copy"] - resolved.ram["headroom"]


def test_too_little_ram_is_refused_with_a_ram_gib_that_does() -> None:
    for ram_given in (False, True):
        request = MemoryRequest(ram_bytes=5 * GIB, ram_given=ram_given)
        with pytest.raises(MemoryPlanError, match="headroom") as caught:
            plan(FLASH, request, DeviceRoom("cpu", None))
        assert caught.value.hint.startswith(
            "raise --ram-gib to " if ram_given else "close other programs or give --ram-gib"
        )
        advised = float(caught.value.hint.split("--ram-gib ")[1].removeprefix("to ").split(",")[0])
        kept = request.headroom_bytes if ram_given else 0  # --ram-gib leaves none unless it was asked for
        enough = dataclasses.replace(request, ram_bytes=int(advised * GIB), headroom_bytes=kept)
        assert plan(FLASH, enough, DeviceRoom("cpu", None)).ram_bytes <= enough.ram_bytes


def test_a_device_of_ram_that_is_too_small_says_the_size_or_to_leave_it_out() -> None:
    room = DeviceRoom("cpu", GIB // 100)
    with pytest.raises(MemoryPlanError, match="RAM as device memory") as caught:
        plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), room)
    assert "--device" not in caught.value.hint
    assert "leave it out" in caught.value.hint
    advised = float(caught.value.hint.split("--vram-gib to ")[1].split(" ")[0])
    assert plan(FLASH, MemoryRequest(ram_bytes=120 * GIB), DeviceRoom("cpu", int(advised * GIB))).num_slots >= 1


def test_page_locking_follows_the_mode_that_is_in_force() -> None:
    pin, below = PinRequest("limit", GIB, partial=True), PinRequest("none", partial=True)
    request = MemoryRequest(ram_bytes=120 * GIB, pin=pin, pin_below=below)
    arena = plan(FLASH, request, CARD)
    assert (arena.mode, arena.request.pin, arena.pin_limit) == ("arena", PinRequest("limit", GIB), GIB)
    lower = plan(FLASH, dataclasses.replace(request, ram_bytes=60 * GIB), CARD)
    assert (lower.mode, lower.request.pin, lower.pin_limit) == ("resident", PinRequest("none"), 0)
    budget = plan(FLASH, dataclasses.replace(request, mode="budget"), CARD)
    assert budget.request.pin.partial


@pytest.mark.parametrize("mode", ["arena", "budget", "mapped"])
def test_a_mode_is_refused_only_for_what_it_takes_itself(mode: RamMode) -> None:
    """Without slots nothing is staged where every expert lies in RAM or in a mapped file: a plan's sum is enough."""
    cpu = DeviceRoom("cpu", None)
    request = MemoryRequest(ram_bytes=120 * GIB, headroom_bytes=0, mode=mode)
    whole = plan(FLASH, request, cpu)
    assert whole.ram["staging"] == 0
    least = dataclasses.replace(request, ram_bytes=whole.ram_bytes)
    assert (plan(FLASH, least, cpu).mode, plan(FLASH, least, cpu).ram) == (mode, whole.ram)
    short = dataclasses.replace(request, ram_bytes=whole.ram_bytes - 1)
    if mode == "mapped":
        with pytest.raises(MemoryPlanError) as caught:
            plan(FLASH, short, cpu)
        assert caught.value.short_bytes == 1
    else:
        lower = plan(FLASH, short, cpu)
        assert lower.num_ram_experts < FLASH.total_experts
        assert lower.ram["staging"] > 0
        assert lower.ram_bytes <= short.ram_bytes


@given(
    ram=st.integers(1 << 20, 140 * GIB),
    mode=st.sampled_from(["arena", "resident", "budget", "mapped"]),
    slots=st.sampled_from([None, 0, 1, 100, 24_576]),
    budget=st.one_of(st.none(), st.integers(0, 70 * GIB)),
    free=st.sampled_from([None, 16 * GIB]),
)
def test_a_plan_takes_no_more_than_there_is_and_no_lower_mode_than_it_must(
    ram: int, mode: RamMode, slots: int | None, budget: int | None, free: int | None
) -> None:
    request = MemoryRequest(ram_bytes=ram, headroom_bytes=0, mode=mode, budget_bytes=budget, expert_cache=slots)
    room = DeviceRoom("cpu", None) if free is None else DeviceRoom("cuda", free)
    try:
        found = plan(FLASH, request, room)
    except MemoryPlanError as error:
        if error.short_bytes and "of RAM are" in error.message:
            enough = dataclasses.replace(request, ram_bytes=ram + error.short_bytes)
            assert plan(FLASH, enough, room).ram_bytes <= enough.ram_bytes
        return
    assert found.ram_bytes <= ram
    if found.mode != mode:
        upper = plan(FLASH, dataclasses.replace(request, ram_bytes=200 * GIB), room)
        assert upper.mode == mode or budget == 0
        assert upper.ram_bytes > ram
