"""Every mechanism of placement is exercised by an arm of ``strata verify``: a list made from the code's own sizes.

RAM modes, tiers and row classes are enumerated; what cannot be reached is listed with its reason, and an arm that
reaches it all the same fails here too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import get_args

import pytest

from strata.config import RamMode, Requested
from strata.engine.arms import ALL_TIERS, FAST, LONG_CHUNKS, SMALL_WINDOWS
from strata.engine.identity import WINDOWS, ArmResult
from strata.engine.prompt_lengths import CHUNK, block_sizes, classes_of_rows
from strata.engine.proof import Proof
from strata.experts.dispatch import LOOK_AHEAD_ROWS, WINDOW_ROWS
from strata.experts.tiers import Tier
from tests.engine.random_models import write_random_model

pytestmark = pytest.mark.slow
MODES: tuple[str, ...] = get_args(RamMode)
# What the dispatcher does with a call of so many rows: a round, a window, a streamed prompt, one that looks ahead, and
# one of a chunk longer than the arms' usual.
CLASSES = {
    "round": range(1, 2),
    "window": range(2, WINDOW_ROWS + 1),
    "streamed": range(WINDOW_ROWS + 1, LOOK_AHEAD_ROWS),
    "looks ahead": range(LOOK_AHEAD_ROWS, CHUNK + 1),
    "long chunk": range(CHUNK + 1, 1 << 20),
}
NO_MAP, WHOLE_COPY, NO_COPY = "no file is mapped", "RAM holds every expert outside VRAM", "RAM keeps no copies"
UNREACHABLE = {
    ("arena", Tier.MAPPED): NO_MAP,
    ("arena", Tier.FILE): WHOLE_COPY,
    ("resident", Tier.MAPPED): NO_MAP,
    ("resident", Tier.FILE): WHOLE_COPY,
    ("budget", Tier.MAPPED): NO_MAP,
    ("mapped", Tier.PINNED): NO_COPY,
    ("mapped", Tier.PAGEABLE): NO_COPY,
    ("mapped", Tier.FILE): "the mapped file has every expert",
}
REACHABLE = [pair for pair in itertools.product(MODES, Tier) if pair not in UNREACHABLE]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Requested:
    path = write_random_model(tmp_path_factory.mktemp("model"), "qwen3_moe")
    return dataclasses.replace(Requested(), model=str(path), ram_gib=1.0, resident_headroom_gib=0.0)


@pytest.fixture(scope="module")
def results(asked: Requested) -> dict[str, ArmResult]:
    """All arms as ``strata verify`` plays them, by name."""
    with Proof.open(asked, None, None) as proof:
        return {result.name: result for result in proof.arms()}


def calls(results: dict[str, ArmResult]) -> Iterator[tuple[str, tuple[Tier, ...], int]]:
    """(mode, tiers that met, rows) of every call of every arm."""
    for result in results.values():
        assert result.seen is not None
        for met, rows in result.seen.calls:
            yield result.mode, met, rows


def class_of(rows: int) -> str:
    return next(name for name, counts in CLASSES.items() if rows in counts)


def test_all_arms_are_identical(results: dict[str, ArmResult]) -> None:
    assert {name: result.verdict for name, result in results.items()} == dict.fromkeys(results, "identical")
    reference = results[FAST].transcript
    assert reference is not None
    digests = dict(zip(reference.lengths, reference.logits_sha256, strict=True))
    for result in results.values():
        assert result.transcript is not None
        played = zip(result.transcript.lengths, result.transcript.logits_sha256, strict=True)
        assert all(digests[length] == digest for length, digest in played), result.name


def test_every_tier_of_every_mode_serves_every_class_of_rows(results: dict[str, ArmResult]) -> None:
    wanted = {(mode, tier, name) for mode, tier in REACHABLE for name in CLASSES}
    found = {(mode, tier, class_of(rows)) for mode, met, rows in calls(results) for tier in met}
    assert wanted - found == set(), "no arm exercises these"
    assert {(mode, tier) for mode, tier, _ in found} & set(UNREACHABLE) == set(), "reachable after all"


def test_every_two_tiers_of_a_mode_meet_in_a_window_and_in_a_prompt(results: dict[str, ArmResult]) -> None:
    both = [
        (mode, pair)
        for mode in MODES
        for pair in itertools.combinations(Tier, 2)
        if all((mode, tier) in REACHABLE for tier in pair)
    ]
    found = {
        (mode, pair, rows <= WINDOW_ROWS)
        for mode, met, rows in calls(results)
        for pair in itertools.combinations(met, 2)
    }
    assert {(*one, window) for one in both for window in (True, False)} - found == set(), "these never met"


def test_experts_are_swapped_in_out_of_every_tier_of_every_mode(results: dict[str, ArmResult]) -> None:
    found = {(result.mode, tier) for result in results.values() if result.seen for tier in result.seen.swaps}
    wanted = {(mode, tier) for mode, tier in REACHABLE if tier is not Tier.VRAM}  # who is in VRAM is not promoted
    assert found == wanted
    for result in results.values():
        assert result.seen is not None
        names = {"PINNED": "swaps_pinned", "PAGEABLE": "swaps_pageable", "MAPPED": "swaps_mapped", "FILE": "swaps_file"}
        assert {result.counters[names[tier.name]] for tier in result.seen.swaps} <= set(result.seen.swaps.values())


def test_every_path_of_page_locking_is_taken(results: dict[str, ArmResult]) -> None:
    assert {result.counters["page_lock_path"] for result in results.values()} == {0, 1, 2, 3}


def test_every_class_of_rows_of_the_kernels_is_computed_from_fast_experts_and_from_all_tiers(
    results: dict[str, ArmResult],
) -> None:
    tiers = (Tier.VRAM, Tier.PINNED, Tier.PAGEABLE, Tier.FILE)
    wanted = {(FAST, Tier.VRAM, rows) for rows in classes_of_rows()}
    wanted |= {(ALL_TIERS, tier, rows) for tier in tiers for rows in classes_of_rows()}
    found = set()
    for name in (FAST, ALL_TIERS, LONG_CHUNKS, SMALL_WINDOWS):
        seen = results[name].seen
        assert seen is not None
        for met, count in seen.calls:
            rows = next(rows for rows in classes_of_rows() if count in rows)
            found |= {(FAST if name == FAST else ALL_TIERS, tier, rows) for tier in met}
    long = next(rows for rows in classes_of_rows() if CHUNK + 1 in rows)
    assert wanted - found <= {(FAST, Tier.VRAM, long)}, "chunks of all experts in VRAM are never longer"


def test_every_edge_of_a_block_is_read_fast_and_from_all_tiers(results: dict[str, ArmResult]) -> None:
    fast, tiers = (results[name].transcript for name in (FAST, ALL_TIERS))
    assert fast is not None
    assert tiers is not None
    for block in block_sizes():
        for length in {block - 1, block, block + 1, block + 5} - {0}:
            assert length in fast.lengths
            assert length in tiers.lengths


def test_windows_of_every_size_are_decoded(results: dict[str, ArmResult]) -> None:
    assert results[FAST].transcript
    for name, result in results.items():
        assert result.seen is not None
        assert name == FAST or {rows for _, rows in result.seen.calls} >= {1, *WINDOWS[:2]}, name


def test_arms_have_names_of_their_own(asked: Requested, results: dict[str, ArmResult]) -> None:
    with Proof.open(asked, (), 8) as proof:
        assert len(set(proof.arm_names)) == len(proof.arm_names) == len(results)
