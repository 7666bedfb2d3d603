"""``--show-config`` against what a plan really does with each option."""

from __future__ import annotations

from typing import Any

import pytest

from strata.config_sources import Effect, resolve
from strata.engine.plan_report import planned_effects
from strata.kernels.cpu.pool import default_threads
from strata.memory.probe import Machine

GIB = 1 << 30
TOTAL = 48 * 128  # experts of qwen3-30b
PINS = (
    "complement_pin_gib",
    "arena_pin_gib",
    "pin_margin_gib",
    "pin_by_need",
    "partial_pin",
    "prefer_slices",
    "test_complement_refuse",
)


def effects(ram_gib: float = 64, *, given: bool = False, **options: Any) -> dict[str, Effect]:
    """On a machine with that much free RAM, or with ``given`` under ``--ram-gib``."""
    ram = int(ram_gib * GIB)
    machine = Machine("", 8, 64 * GIB, ram, "free RAM", None, (), ())
    asked = {"ram_gib": ram_gib} if given else {}
    found = planned_effects(resolve(arguments={"model": "qwen3-30b", **asked, **options}), machine)
    assert len({effect.option for effect in found}) == len(found), "one effect an option"
    return {effect.option: effect for effect in found}


def test_what_was_left_to_the_plan_has_its_number() -> None:
    found = effects()
    assert found["max_context"] == Effect("max_context", True, "8,192 positions")
    assert found["threads"].why.split()[0] == str(default_threads())
    assert found["ram_gib"].why.startswith("64.00 GiB may be used: ")
    assert found["resident_headroom_gib"] == Effect("resident_headroom_gib", True, "4.00 GiB stay free")
    assert found["vram_gib"].why.startswith("no device memory")
    assert effects(8)["resident_headroom_gib"].why == "2.00 GiB stay free"
    assert effects(threads=1)["threads"].why == "1 thread"


def test_ram_gib_leaves_no_headroom_unless_it_is_asked_for() -> None:
    found = effects(30, given=True)
    assert found["ram_gib"].why == "30.00 GiB may be used"
    assert found["resident_headroom_gib"] == Effect("resident_headroom_gib", False, "--ram-gib says what may be used")
    assert effects(30, given=True, resident_headroom_gib=0)["resident_headroom_gib"].in_force
    assert effects(30, given=True, resident_headroom_gib=2)["resident_headroom_gib"].why == "2.00 GiB stay free"


def test_ram_stands_in_for_device_memory() -> None:
    vram = effects(vram_gib=6)["vram_gib"]
    assert vram.in_force
    assert vram.why.startswith("RAM stands in for device memory, ")
    assert vram.why.endswith("of 6.00 GiB planned")


def test_a_cache_larger_than_the_model_and_a_chunk_larger_than_the_context_are_said_to_be_cut() -> None:
    found = effects(expert_cache=TOTAL + 1, prefill=4096, max_context=1000)
    assert found["expert_cache"].why.startswith("6,144 slots of ")
    assert found["expert_cache"].why.endswith("cut from 6,145: the model has no more experts")
    assert found["prefill"].why == "chunks of up to 1,000 rows, all that the context holds"
    found = effects(expert_cache=TOTAL, prefill=100)
    assert "cut" not in found["expert_cache"].why
    assert found["prefill"].why == "chunks of up to 100 rows"


@pytest.mark.parametrize(
    ("options", "every", "swaps"),
    [
        ({"expert_cache": 0}, False, False),
        ({"expert_cache": TOTAL}, False, False),
        ({"expert_cache": 48}, True, True),
        ({"expert_cache": 48, "adapt_every": 0}, True, False),
        ({"expert_cache": 48, "adapt_swaps": 0}, False, True),
    ],
)
def test_rounds_and_swaps_act_together(options: dict[str, int], every: bool, swaps: bool) -> None:
    found = effects(**options)
    assert (found["adapt_every"].in_force, found["adapt_swaps"].in_force) == (every, swaps)
    assert found["adapt_every"].why
    assert found["adapt_swaps"].why


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"expert_cache": 48}, {"complement_pin_gib", "pin_margin_gib", "partial_pin"}),
        ({"expert_cache": 48, "resident_experts": True}, {"arena_pin_gib", "pin_margin_gib", "partial_pin"}),
        ({"expert_cache": 48, "resident_budget_gib": 4}, {"arena_pin_gib", "pin_margin_gib"}),
        ({"expert_cache": 48, "mmap_experts": True}, set(PINS)),
        ({}, set(PINS)),  # no device reads anything
    ],
)
def test_page_locking_variables_that_count_nothing_are_refused(options: dict[str, Any], refused: set[str]) -> None:
    found = effects(**options)
    assert {name for name in PINS if name in found and not found[name].in_force} == refused
    assert all(found[name].why for name in refused)


def test_page_locking_nothing_leaves_no_order_of_paths() -> None:
    found = effects(expert_cache=48, arena_pin_gib="none", prefer_slices=True)
    assert found["prefer_slices"] == Effect("prefer_slices", False, "STRATA_ARENA_PIN_GIB says to page-lock nothing")
    assert "prefer_slices" not in effects(expert_cache=48, prefer_slices=True), "in force: nothing to add"


@pytest.mark.parametrize(
    ("options", "in_force", "words"),
    [
        ({}, False, "prompts stream nothing: the CPU computes every expert where it lies"),
        ({"expert_cache": TOTAL}, False, "prompts stream nothing: the device holds every expert"),
        ({"expert_cache": 48, "resident_budget_gib": 1e-6}, False, "RAM mode budget: RAM holds no expert"),
        ({"expert_cache": 48, "prefill_cpu_share": 0.25}, True, "the CPU computes the rarest 25 % of a prompt's"),
        ({"expert_cache": 48, "prefill_cpu_share": 0.25, "mmap_experts": True}, True, "the rarest 25 % of"),
        ({"expert_cache": 48, "prefill_cpu_share": 0.0}, True, "the device computes every expert of a prompt"),
        ({"expert_cache": 48}, True, "auto: the device computes every expert of a prompt"),
    ],
)
def test_the_share_of_the_cpu_in_prompts(options: dict[str, Any], in_force: bool, words: str) -> None:
    found = effects(**options)["prefill_cpu_share"]
    assert found.in_force is in_force
    assert words in found.why


def test_the_link_is_shared_with_a_card_alone() -> None:
    found = effects(expert_cache=48, pcie_frac=0.5, pcie_balance=False)
    assert not found["pcie_frac"].in_force
    assert found["pcie_balance"].why == "no CUDA device is in use: the CPU computes every expert where it lies"
    card = {"device": "cuda", "vram_gib": 16}
    assert effects(**card)["pcie_balance"] == Effect("pcie_balance", True, "all misses of a layer count")
    fixed = effects(**card, pcie_balance=False)["pcie_balance"]
    assert fixed == Effect("pcie_balance", True, "a fixed share of the page-locked misses")
    assert effects(iq_mt_min=8)["iq_mt_min"].in_force


def test_the_mailbox_is_a_cards() -> None:
    assert not effects(expert_cache=48)["mailbox"].in_force
    card = {"device": "cuda", "vram_gib": 16}
    assert effects(**card)["mailbox"] == Effect("mailbox", True, "tested when the model is loaded")
    assert "the host hands over" in effects(**card, mailbox="off")["mailbox"].why


def test_the_share_of_the_link_is_nothing_where_every_expert_has_a_slot() -> None:
    found = effects(device="cuda", vram_gib=120)
    for name in ("pcie_frac", "pcie_balance"):
        assert found[name] == Effect(name, False, "every expert has a slot: nothing is read over the link")


def test_a_card_says_how_it_reads_prompts_and_what_it_reads_over_the_link() -> None:
    options: dict[str, Any] = {"device": "cuda", "vram_gib": 12}
    found = effects(**options, prefill="1024")
    assert found["prefill"] == Effect("prefill", True, "chunks of up to 1,024 rows")
    assert "prefill_borrow" not in found
    every = "the card computes every expert of a prompt that is read in chunks"
    assert found["prefill_cpu_share"] == Effect("prefill_cpu_share", False, every)
    reserved = effects(**options, expert_cache=0)["prefill_borrow"]
    assert reserved == Effect("prefill_borrow", False, "the cache has no slot to lend: 64 slots are reserved")
    by_rates = "auto: the card reads the link's part of what link and RAM give together, measured while loading"
    assert found["pcie_frac"] == Effect("pcie_frac", True, by_rates)
    assert effects(**options, pcie_frac=0.4)["pcie_frac"].why == "the card reads 40 %"
