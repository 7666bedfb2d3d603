"""From options to the planner's numbers: how much RAM stays free, and which variable page-locks."""

from __future__ import annotations

import dataclasses

import pytest

from strata.config import Requested
from strata.config_sources import resolve
from strata.engine.plan_report import plan_subject
from strata.engine.plan_subject import find_subject
from strata.engine.planning import MOST_ROWS, headroom_bytes
from strata.errors import MemoryPlanError
from strata.memory.planner import ResolvedPlan, lent_slots
from strata.memory.probe import Gpu, Machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "available", "expected"),
    [
        ({}, 64 * GIB, 4 * GIB),
        ({}, 16 * GIB, 4 * GIB),
        ({}, 4 * GIB, GIB),
        ({}, 1 * GIB, GIB // 4),
        ({"ram_gib": "2"}, 2 * GIB, 0),
        ({"resident_headroom_gib": "4"}, 4 * GIB, 4 * GIB),  # set, though to the default's number
        ({"resident_headroom_gib": "3", "ram_gib": "2"}, 2 * GIB, 3 * GIB),
    ],
)
def test_headroom_is_a_quarter_of_a_small_machine_unless_set(
    options: dict[str, str], available: int, expected: int
) -> None:
    assert headroom_bytes(resolve(command_line=options), available) == expected


def test_headroom_set_without_an_origin_counts_as_set() -> None:
    assert headroom_bytes(dataclasses.replace(Requested(), resident_headroom_gib=0.5), 64 * GIB) == GIB // 2


@pytest.mark.parametrize("free_mib", [256, 1024, 4096])
def test_the_built_in_model_is_planned_on_a_machine_with_little_free_ram(free_mib: int) -> None:
    free = free_mib << 20
    plan = plan_subject(
        find_subject(None, "bf16"), Requested(), Machine("", 2, 4 * GIB, free, "free RAM", None, (), ())
    )
    assert plan.mode == "arena"
    assert plan.ram["headroom"] == free // 4
    assert plan.ram_bytes <= free


def plan_of_card(vram_gib: float, **options: str) -> ResolvedPlan:
    card = Gpu("a card", int(vram_gib * GIB), int(vram_gib * GIB), "600.1")
    machine = Machine("", 8, 128 * GIB, 120 * GIB, "free RAM", None, (card,), ())
    requested = resolve(command_line={"device": "cuda", "vram_gib": str(vram_gib), **options})
    return plan_subject(find_subject("flash-next", "bf16"), requested, machine)


def test_a_chunk_of_a_card_is_as_large_as_its_option_allows_and_the_cache_lends() -> None:
    """'auto' takes what covers the link and gives way to a small card; a number does not."""
    large, small = plan_of_card(32, max_context="40960"), plan_of_card(10, max_context="40960")
    assert large.request.chunk_rows == MOST_ROWS == 16384
    assert 512 <= small.request.chunk_rows < large.request.chunk_rows
    for plan in (large, small):
        assert plan.vram_bytes <= plan.device.free_bytes
        assert plan.ring_slots > 0
        assert plan.ring_borrowed
    assert plan_of_card(32, max_context="40960", prefill="auto:12288").request.chunk_rows == 12288
    assert plan_of_card(32, max_context="40960", prefill="32768").request.chunk_rows == 32768
    assert plan_of_card(32, prefill="700").request.chunk_rows == 704  # whole blocks of the delta rule
    none = plan_of_card(32, expert_cache="0")
    assert not none.ring_borrowed
    assert none.num_device_slots == none.ring_slots == 64


@pytest.mark.parametrize("vram_gib", [10, 12, 16, 24, 32, 48])
def test_a_cards_prompts_borrow_their_buffers_where_the_cache_has_them(vram_gib: int) -> None:
    borrowed = plan_of_card(vram_gib, max_context="16384")
    reserved = plan_of_card(vram_gib, max_context="16384", prefill_borrow="0")
    rows = borrowed.request.chunk_rows
    assert borrowed.lent_bytes > rows * 10 * 2560 * 2  # the experts' outputs alone
    assert "prompt buffers" not in borrowed.vram
    assert reserved.lent_bytes == 0
    assert reserved.vram["prompt buffers"] > reserved.request.chunk_rows * 10 * 2560 * 2
    assert borrowed.num_slots > reserved.num_slots
    lent = lent_slots(borrowed.lent_bytes, borrowed.stride)
    assert lent * borrowed.stride >= borrowed.lent_bytes
    assert lent + borrowed.ring_slots <= borrowed.num_slots
    assert borrowed.num_ram_experts == borrowed.shape.total_experts


def test_what_fits_beside_every_expert_is_reserved() -> None:
    plan = plan_of_card(100)
    assert plan.num_slots == plan.shape.total_experts
    assert plan.ring_slots == plan.lent_bytes == 0
    assert plan.vram["prompt buffers"] > 0
    assert plan.request.chunk_rows == 8192


def test_a_refusal_names_the_chunk_that_fits_and_windows_where_none_does() -> None:
    for vram_gib in (7.4, 7.2):
        with pytest.raises(MemoryPlanError) as refused:
            plan_of_card(vram_gib)
        asked = refused.value.hint.removeprefix("use --prefill ")
        plan = plan_of_card(vram_gib, prefill=asked)
        assert plan.num_slots >= 1
    assert asked == "128"
    assert not plan.request.in_chunks
    with pytest.raises(MemoryPlanError, match="with 8,192 tokens of context and one expert slot"):
        plan_of_card(vram_gib, prefill="512")
