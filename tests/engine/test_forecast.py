"""The forecast against sums worked out by hand, and rates against what was written."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from strata.config import Requested
from strata.engine.forecast import Forecast, forecast, interpolate, turns
from strata.engine.plan_report import plan_subject
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.rates import LayerCosts, Rates, RatesKey, read_rates, write_rates
from strata.kernels.rates import KernelRates
from strata.memory.bandwidth import Bandwidths
from strata.memory.planner import GIB, ResolvedPlan
from strata.memory.probe import Machine

FLAT = {1: 1e9, 64: 1e9}
BANDWIDTHS = Bandwidths(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9)
KERNELS = KernelRates({"nvfp4": {1: FLAT}}, {"q8_0": {1: FLAT}, "bf16": {1: FLAT}, "f32": {1: FLAT}}, {1: FLAT})
FREE = LayerCosts(0, 0, 0, 0, 0, 0)
RATES = Rates(BANDWIDTHS, KERNELS, {"qwen3_moe": FREE})


def planned(ram_gib: float = 64, **options: object) -> tuple[PlanSubject, ResolvedPlan]:
    subject = find_subject("qwen3-30b", "bf16")
    machine = Machine("", 8, int(ram_gib * GIB), int(ram_gib * GIB), "free RAM", None, (), ())
    requested = dataclasses.replace(Requested(), **options)  # type: ignore[arg-type]
    return subject, plan_subject(subject, requested, machine)


def expect(rates: Rates = RATES, tokens: int = 512, **options: object) -> Forecast:
    found = forecast(*planned(**options), rates, prompt_tokens=tokens)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_token_of_the_30b_shape_counts_what_the_shape_says() -> None:
    """A rate of 1e9 multiply-adds a second turns counts into seconds."""
    parts = expect().decode_parts
    attention = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048)  # query and output, key and value
    assert parts["dense"] == pytest.approx((attention + 48 * 128 * 2048 + 151936 * 2048) / 1e9)
    assert parts["experts"] == pytest.approx(48 * 8 * 3 * 2048 * 768 / 1e9)
    assert parts["attention and state"] == pytest.approx(48 * 2 * 32 * 128 * 512 / 1e9)
    assert parts["experts from the file"] == parts["launches"] == 0


def test_a_prompt_counts_rows_and_the_head_once() -> None:
    """Every row but the head's is multiplied; every pick is computed, however they are grouped."""
    found = expect(tokens=512)
    attention = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048)
    assert found.prompt_parts["dense"] == pytest.approx((512 * (attention + 48 * 128 * 2048) + 151936 * 2048) / 1e9)
    assert found.prompt_parts["experts"] == pytest.approx(512 * 48 * 8 * 3 * 2048 * 768 / 1e9)
    assert found.prompt_rate == pytest.approx(512 / sum(found.prompt_parts.values()))
    assert expect(tokens=1024).prompt_parts["experts"] == pytest.approx(2 * found.prompt_parts["experts"])


def test_costs_of_a_layer_are_added_layer_by_layer() -> None:
    costs = LayerCosts(a_round=1e-3, a_row=1e-6, a_pick=1e-7, a_fetch=0, a_read=0, a_load=0)
    found = expect(dataclasses.replace(RATES, layers={"qwen3_moe": costs}))
    assert found.decode_parts["launches"] == pytest.approx(48e-3)
    more = found.prompt_parts["launches"] - expect().prompt_parts["launches"]
    assert more == pytest.approx(48 * (1e-3 + 512 * (1e-6 + 8e-7)))


def test_what_only_the_drive_holds_is_waited_for() -> None:
    """RAM holds 3 GiB of 15.19; the drive reads while the rest is computed."""
    slow = dataclasses.replace(BANDWIDTHS, drive_pieces=0.2e9)
    found = expect(dataclasses.replace(RATES, bandwidths=slow), ram_gib=10, resident_budget_gib=3.0)
    share = 1 - 3 * GIB // 2_654_208 / 6144
    cached = min(1.0, (10 * GIB - planned(10, resident_budget_gib=3.0)[1].ram_bytes) / (share * 6144 * 2_654_208))
    drive = 0.0 if planned(10, resident_budget_gib=3.0)[1].direct_reads is False else share
    reading = 48 * 8 * 2_654_208 / 0.2e9
    assert drive == pytest.approx(share)
    assert cached < 0.25
    later = 1 - 4 / (8 * share)  # all but the first four reads of a layer arrive while others are computed
    overlap = found.decode_parts["experts"] * (1 - share + share * later)
    assert found.decode_parts["experts from the file"] == pytest.approx(reading * share - overlap)


def test_a_mapped_file_is_as_fast_as_its_small_pages() -> None:
    slow = dataclasses.replace(BANDWIDTHS, mapped_read=0.5e9)
    arena = expect()
    mapped = expect(dataclasses.replace(RATES, bandwidths=slow), mmap_experts=True)
    assert mapped.decode_parts["experts"] == pytest.approx(2 * arena.decode_parts["experts"])
    assert mapped.decode_parts["experts from the file"] == 0


def test_a_simulated_card_moves_what_it_does_not_hold() -> None:
    found = expect(vram_gib=6.0, expert_cache=1000, adapt_every=0)
    lent = 2 * 128  # a ring of two layers' experts, borrowed: their own experts are moved as well, and back afterwards
    moved = 6144 - 1000 + lent
    assert found.prompt_parts["moving experts"] == pytest.approx(moved * 2_654_208 / 1e9, rel=1e-6)
    assert found.refill_seconds == pytest.approx(lent * 2_654_208 / 1e9)
    seconds = 10 / found.decode_rate + found.refill_seconds
    assert found.decode_rate_over(10) == pytest.approx(10 / seconds)
    assert "once after a prompt" in "\n".join(found.lines())
    reserved = expect(vram_gib=8.0, expert_cache=1000, adapt_every=0, prefill_borrow=False)
    assert reserved.prompt_parts["moving experts"] == pytest.approx((6144 - 1000) * 2_654_208 / 1e9, rel=1e-6)
    assert reserved.refill_seconds == expect().refill_seconds == 0
    assert found.decode_parts["experts"] == expect().decode_parts["experts"]


@pytest.mark.parametrize(("picked", "share", "lanes"), [(8, 0.5, 4), (8, 0.1, 4), (10, 0.9, 2), (3, 1.0, 4)])
def test_turns_are_what_chance_gives(picked: int, share: float, lanes: int) -> None:
    source = random.Random(0)
    drawn = [math.ceil(sum(source.random() < share for _ in range(picked)) / lanes) for _ in range(20_000)]
    assert turns(picked, share, lanes) == pytest.approx(sum(drawn) / len(drawn), rel=0.03)


def test_turns_of_many_are_their_mean() -> None:
    assert turns(128, 0.5, 4) == 16


def test_rates_between_sizes_are_straight_in_logarithms() -> None:
    rates = {1: 10.0, 16: 160.0}
    assert interpolate(rates, 4) == pytest.approx(40)
    assert (interpolate(rates, 0.5), interpolate(rates, 1000)) == (10, 160)


def test_a_family_or_format_that_was_not_measured_has_no_forecast() -> None:
    assert forecast(*planned(), dataclasses.replace(RATES, layers={})) is None
    other = dataclasses.replace(KERNELS, experts={"bf16": {1: FLAT}})
    assert forecast(*planned(), dataclasses.replace(RATES, kernels=other)) is None


def test_rates_are_kept_for_this_machine_threads_and_version_alone(tmp_path: Path) -> None:
    key = RatesKey("A processor", "avx2", 2, "0.1.0")
    write_rates(tmp_path, key, RATES)
    assert read_rates(tmp_path, key) == RATES
    for change in ({"threads": 4}, {"version": "0.2.0"}, {"cpu": "Another"}, {"isa": "scalar"}):
        assert read_rates(tmp_path, dataclasses.replace(key, **change)) is None  # type: ignore[arg-type]
    for text in ("", "{}", "[1]", '{"key": {}, "rates": {}}'):
        key.path(tmp_path).write_text(text)
        assert read_rates(tmp_path, key) is None


def test_lines_name_both_rates_and_where_the_time_goes() -> None:
    text = "\n".join(expect().lines())
    assert "tok/s (512 tokens), decode" in text
    assert "ms a token: dense" in text
