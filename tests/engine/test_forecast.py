"""The forecast against sums worked out by hand, and rates against what was written."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from strata.config import Requested
from strata.engine.forecast import Forecast, chances, forecast, interpolate, read_seconds, unmeasured
from strata.engine.plan_report import plan_subject
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.rates import FileCosts, LayerCosts, Rates, RatesKey, read_rates, write_rates
from strata.kernels.rates import KernelRates
from strata.memory.bandwidth import Bandwidths
from strata.memory.planner import GIB, ResolvedPlan
from strata.memory.probe import Machine

FLAT = {1: 1e9, 64: 1e9}
BANDWIDTHS = Bandwidths(1e9, 1e9, 1e9, 4, 1e9, 1e9)
KERNELS = KernelRates({"nvfp4": {1: FLAT}}, {"q8_0": {1: FLAT}, "bf16": {1: FLAT}, "f32": {1: FLAT}}, {1: FLAT})
FREE = LayerCosts(0, 0, 0, 0)
# A byte in a nanosecond from the page cache, in five from the drive, and a millisecond for each expert of a layer.
CACHED = {size: {1: 1e-3 + 1e-9 * size, 16: 16e-3 + 16e-9 * size} for size in (1000, 1_000_000)}
DRIVE = {size: {1: 1e-3 + 5e-9 * size, 16: 16e-3 + 80e-9 * size} for size in (1000, 1_000_000)}
RATES = Rates(BANDWIDTHS, KERNELS, {"qwen3_moe": FREE}, FileCosts(CACHED, DRIVE))


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
    costs = LayerCosts(a_round=1e-3, a_row=1e-6, a_pick=1e-7, a_load=0)
    found = expect(dataclasses.replace(RATES, layers={"qwen3_moe": costs}))
    assert found.decode_parts["launches"] == pytest.approx(48e-3)
    more = found.prompt_parts["launches"] - expect().prompt_parts["launches"]
    assert more == pytest.approx(48 * (1e-3 + 512 * (1e-6 + 8e-7)))


def test_what_only_the_drive_holds_is_waited_for() -> None:
    """RAM holds 3 GiB of 15.19; the drive reads while the rest is computed."""
    found = expect(ram_gib=10, resident_budget_gib=3.0)
    assert planned(10, resident_budget_gib=3.0)[1].direct_reads
    share = 1 - 3 * GIB // 2_654_208 / 6144
    reading = 48 * 8 * share * (1e-3 + 5e-9 * 2_654_208)
    overlap = found.decode_parts["experts"] * (1 - share)
    assert overlap < reading
    assert found.decode_parts["experts from the file"] == pytest.approx(reading - overlap)


def test_copies_from_the_page_cache_leave_the_processors_that_do_not_copy() -> None:
    """Four of eight processors copy; the others compute what lies in memory meanwhile."""
    found = expect(ram_gib=64, resident_budget_gib=3.0)
    share = 1 - 3 * GIB // 2_654_208 / 6144
    copying = 48 * 8 * share * (1e-3 + 1e-9 * 2_654_208)
    hidden = min(found.decode_parts["experts"] * (1 - share), copying / 2)
    assert found.decode_parts["experts from the file"] == pytest.approx(copying - hidden)


def test_a_prompt_computes_many_rows_while_the_drive_reads() -> None:
    """All experts of a layer are read; all but the first four arrive while rows beyond the first are computed."""
    slow = {size: {number: 100 * seconds for number, seconds in by.items()} for size, by in DRIVE.items()}
    found = expect(dataclasses.replace(RATES, file=FileCosts(CACHED, slow)), ram_gib=4, resident_budget_gib=1e-6)
    assert planned(4, resident_budget_gib=1e-6)[1].direct_reads
    picked = 128 * (1 - (1 - 8 / 128) ** 512)
    reading = 48 * picked * 100 * (1e-3 + 5e-9 * 2_654_208)
    one_row = 48 * picked * 3 * 2048 * 768 / 1e9
    more_rows = found.prompt_parts["experts"] - one_row
    assert 0 < more_rows < reading
    waited = reading - more_rows * (1 - 4 / picked)
    assert found.prompt_parts["experts from the file"] == pytest.approx(waited)
    fast = expect(ram_gib=4, resident_budget_gib=1e-6)  # all is hidden but for the first four experts
    assert fast.prompt_parts["experts from the file"] == pytest.approx(reading / 100 * 4 / picked)


def test_a_file_that_was_not_measured_is_read_at_the_rate_of_copies() -> None:
    found = expect(dataclasses.replace(RATES, file=None), resident_budget_gib=1e-6)
    assert found.decode_parts["experts from the file"] == pytest.approx(48 * 8 * 2_654_208 / 1e9)
    without_drive = dataclasses.replace(RATES, file=FileCosts(CACHED, None))
    some = expect(without_drive, ram_gib=10, resident_budget_gib=1e-6).decode_parts["experts from the file"]
    assert some == pytest.approx(48 * 8 * (1e-3 + 1e-9 * 2_654_208))


def test_reads_between_numbers_and_sizes_are_on_a_line() -> None:
    costs = {100: {2: 1.0, 4: 3.0}, 200: {2: 2.0, 4: 5.0}}
    assert read_seconds(costs, 100, 3) == 2.0
    assert read_seconds(costs, 150, 3) == 2.75
    assert read_seconds(costs, 300, 2) == 3.0
    assert read_seconds(costs, 100, 1) == 0.5  # none cost nothing
    assert read_seconds(costs, 200, 6) == 8.0
    assert read_seconds(costs, 1, 0) == 0
    assert read_seconds({100: {1: 0.1}, 200: {1: 1.0}}, 10, 1) == 0


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


@pytest.mark.parametrize(("picked", "share"), [(8, 0.5), (8, 0.1), (10, 0.9), (3, 1.0)])
def test_chances_are_those_of_picking_each_apart(picked: int, share: float) -> None:
    source = random.Random(0)
    drawn = [sum(source.random() < share for _ in range(picked)) for _ in range(20_000)]
    for number, chance in chances(picked, share):
        assert chance == pytest.approx(drawn.count(int(number)) / len(drawn), abs=0.02)


def test_of_many_picks_the_mean_counts() -> None:
    assert chances(128, 0.5) == [(64, 1.0)]


def test_rates_between_sizes_are_straight_in_logarithms() -> None:
    rates = {1: 10.0, 16: 160.0}
    assert interpolate(rates, 4) == pytest.approx(40)
    assert (interpolate(rates, 0.5), interpolate(rates, 1000)) == (10, 160)


def test_a_family_or_format_that_was_not_measured_has_no_forecast() -> None:
    subject, plan = planned()
    others = dataclasses.replace(KERNELS, experts={"bf16": {1: FLAT}})
    for change, lacking in (
        ({}, []),
        ({"layers": {"qwen4_exp": FREE}}, ["the layers of qwen3_moe"]),
        ({"kernels": others}, ["experts in nvfp4"]),
        ({"layers": {"qwen4_exp": FREE}, "kernels": others}, ["the layers of qwen3_moe", "experts in nvfp4"]),
    ):
        rates = dataclasses.replace(RATES, **change)  # type: ignore[arg-type]
        assert unmeasured(rates, subject) == lacking
        assert (forecast(subject, plan, rates) is None) == bool(lacking)


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
