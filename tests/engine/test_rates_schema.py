"""A kept file of rates with any one thing wrong in it: named in one line and left alone, never divided by."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine import rates as rates_module
from strata.engine.forecast import forecast
from strata.engine.plan_subject import PlanSubject
from strata.engine.rates import FileCosts, LayerCosts, Rates, RatesKey, read_rates, write_rates
from strata.memory.planner import ResolvedPlan
from tests.engine.test_forecast import CACHED, DRIVE, FREE, RATES, planned

KEY = RatesKey("A processor", "avx2", 2, "0.1.0")
KEPT = dataclasses.replace(RATES, layers={"qwen3_moe": FREE, "qwen4_exp": LayerCosts(1e-3, 1e-5, 1e-7, 1e-5)})
MISSING = "missing"
JUNK = (0, -1, math.nan, math.inf, -math.inf, "fast", "", [], [1], {}, None, True, 1e9, 1e300, 5e-324, MISSING)
NAMES = ("0", "-1", "x", "", "1e9", "9" * 400)
Place = tuple[str, ...]


def table() -> dict[str, Any]:
    """What ``write_rates`` writes, as it is read back."""
    found: dict[str, Any] = json.loads(json.dumps({"key": dataclasses.asdict(KEY), "rates": dataclasses.asdict(KEPT)}))
    return found


def places(node: object, at: Place = ()) -> Iterator[Place]:
    """Every field, from the whole tables down to single numbers."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield (*at, name)
            yield from places(inner, (*at, name))


PLACES = sorted(places(table()))


@functools.cache
def plans() -> tuple[tuple[PlanSubject, ResolvedPlan], ...]:
    """One for each part of a forecast: all in RAM, some read from the drive or its cache, mapped, moved to slots."""
    return (
        planned(),
        planned(10, resident_budget_gib=3.0),
        planned(64, resident_budget_gib=3.0),
        planned(mmap_experts=True),
        planned(vram_gib=6.0, expert_cache=1000, adapt_every=0),
    )


def read_back(text: str | bytes) -> tuple[Rates | None, list[str]]:
    """What is read of a file of this text, and the lines that are logged."""
    rates_module._warn.cache_clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("strata.engine.rates")
    logger.addHandler(handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            KEY.path(Path(folder)).write_bytes(text if isinstance(text, bytes) else text.encode())
            found = read_rates(Path(folder), KEY)
            assert read_rates(Path(folder), KEY) == found
            return found, lines
    finally:
        logger.removeHandler(handler)


def check(text: str | bytes, field: str) -> None:
    """A forecast in numbers, or one line with the file, the field and the way out."""
    found, lines = read_back(text)
    if found is None:
        (line,) = lines
        assert KEY.path(Path()).name in line
        assert field in line
        assert "'strata plan --measure'" in line
        assert "\n" not in line
        return
    assert not lines
    for subject, plan in plans():
        expected = forecast(subject, plan, found, prompt_tokens=512)
        if expected is None:  # all of a family or format is gone
            continue
        for rate in (expected.prompt_rate, expected.decode_rate, expected.decode_rate_over(10)):
            assert 0 < rate < math.inf
        seconds = (*expected.prompt_parts.values(), *expected.decode_parts.values(), expected.refill_seconds)
        assert all(0 <= one < math.inf for one in seconds)
        assert not any(word in line for line in expected.lines() for word in ("nan", "inf"))


def damaged(place: Place, junk: object, name: str | None = None) -> str:
    """The file's text with one field replaced by ``junk``, or with another ``name``."""
    whole = table()
    node = functools.reduce(lambda inner, step: inner[step], place[:-1], whole)
    if name is not None:
        node[name] = node.pop(place[-1])
    elif junk is MISSING:
        del node[place[-1]]
    else:
        node[place[-1]] = junk
    return json.dumps(whole)


def test_what_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    for file in (None, FileCosts(CACHED, None), FileCosts(CACHED, DRIVE)):
        rates = dataclasses.replace(KEPT, file=file)
        text = write_rates(tmp_path, KEY, rates).read_text()
        assert read_back(text) == (rates, [])


@settings(max_examples=600)
@given(st.sampled_from(PLACES), st.sampled_from(JUNK))
def test_a_field_that_is_junk_is_named_or_does_no_harm(place: Place, junk: object) -> None:
    check(damaged(place, junk), place[0] if place[0] == "key" else ".".join(place[:-1]))


@settings(max_examples=200)
@given(st.sampled_from(PLACES), st.sampled_from(NAMES))
def test_a_field_of_another_name_is_named_or_does_no_harm(place: Place, name: str) -> None:
    check(damaged(place, None, name), place[0] if place[0] == "key" else ".".join(place[:-1]))


@settings(max_examples=100)
@given(st.binary(max_size=40), st.integers(0, len(json.dumps(table()))))
def test_a_file_cut_or_overwritten_is_named(junk: bytes, at: int) -> None:
    text = json.dumps(table()).encode()
    check(text[:at], "")
    check(text[:at] + junk + text[at + len(junk) :], "")
    check(junk, "")


@pytest.mark.parametrize(
    ("place", "junk", "field"),
    [
        ("bandwidths.memory_read", 0, "rates.bandwidths.memory_read"),
        ("bandwidths.memory_read", "fast", "rates.bandwidths.memory_read"),
        ("bandwidths.memory_copy", math.nan, "rates.bandwidths.memory_copy"),
        ("bandwidths.single_copy", -1e9, "rates.bandwidths.single_copy"),
        ("bandwidths.stager_threads", 1e9, "rates.bandwidths.stager_threads"),
        ("bandwidths.stager_threads", 1_000_000_000, "rates.bandwidths.stager_threads"),
        ("bandwidths.stager_threads", True, "rates.bandwidths.stager_threads"),
        ("kernels.experts.nvfp4", {}, "rates.kernels.experts.nvfp4"),
        ("kernels.experts.nvfp4.1", {}, "rates.kernels.experts.nvfp4.1"),
        ("kernels.linear.q8_0.1.64", 0, "rates.kernels.linear.q8_0.1.64"),
        ("kernels.linear.q8_0", MISSING, "rates.kernels.linear.q8_0"),
        ("kernels.attention", [], "rates.kernels.attention"),
        ("layers", [], "rates.layers"),
        ("layers", {}, "rates.layers"),
        ("layers.qwen3_moe.a_round", math.inf, "rates.layers.qwen3_moe.a_round"),
        ("file.cached", {"1000": {"1": 1.0}}, "rates.file.cached"),
        ("file.drive.1000.1", -1, "rates.file.drive.1000.1"),
    ],
)
def test_damage_is_refused_by_the_name_of_its_field(place: str, junk: object, field: str) -> None:
    found, lines = read_back(damaged(("rates", *place.split(".")), junk))
    assert found is None
    assert len(lines) == 1
    assert f": {field}: " in lines[0]


def test_a_file_of_another_machine_under_this_name_is_not_used() -> None:
    found, lines = read_back(damaged(("key", "cpu"), "Another"))
    assert found is None
    assert "key: is of another machine" in lines[0]


def test_a_folder_in_its_place_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    KEY.path(tmp_path).mkdir()
    assert read_rates(tmp_path, KEY) is None
    assert "it is a folder, not a file; remove it" in caplog.text
    (tmp_path / "file").touch()
    assert read_rates(tmp_path / "file", KEY) is None
    assert read_rates(tmp_path / "nothing", KEY) is None
    assert len(caplog.records) == 1
