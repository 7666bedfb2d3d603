"""Policies are arithmetic: rankings, swaps and splits on numbers that can be checked by eye, and a simulation."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.experts.policy import (
    HYSTERESIS_PICKS,
    HYSTERESIS_RATIO,
    Swap,
    choose_swaps,
    decay_counts,
    rank_experts,
    split_pinned,
)


def test_equal_heat_fills_all_layers_evenly() -> None:
    ranked = rank_experts(np.zeros((3, 4)))
    assert ranked[:6].tolist() == [0, 4, 8, 1, 5, 9]


def test_the_hottest_comes_first() -> None:
    heat = np.array([[1.0, 5.0], [3.0, 5.0]])
    assert rank_experts(heat).tolist() == [1, 3, 2, 0]


def test_a_swap_exchanges_the_hottest_outside_with_the_coldest_inside_of_a_layer() -> None:
    heat = np.array([[9.0, 1.0, 5.0, 7.0], [0.0, 0.0, 0.0, 30.0]])
    inside = np.array([[True, True, False, False], [True, False, False, False]])
    assert choose_swaps(heat, inside, 5) == [Swap(7, 4), Swap(3, 1)]
    assert choose_swaps(heat, inside, 1) == [Swap(7, 4)]
    assert choose_swaps(heat, inside, 0) == []


def test_a_draft_gets_the_swaps_that_the_model_leaves() -> None:
    heat = np.array([[0.0, 5.0, 0.0, 4.0], [0.0, 90.0, 0.0, 80.0]])
    inside = np.array([[True, False, True, False], [True, False, True, False]])
    assert choose_swaps(heat, inside, 2) == [Swap(5, 4), Swap(7, 6)]
    assert choose_swaps(heat, inside, 2, draft_layers=1) == [Swap(1, 0), Swap(3, 2)]
    assert choose_swaps(heat, inside, 3, draft_layers=1) == [Swap(1, 0), Swap(3, 2), Swap(5, 4)]


def test_equals_do_not_swap_for_ever() -> None:
    inside = np.array([[True, False]])
    assert choose_swaps(np.array([[10.0, 11.0]]), inside, 4) == []
    assert choose_swaps(np.array([[0.0, 0.5]]), inside, 4) == []
    assert choose_swaps(np.array([[10.0, 14.0]]), inside, 4) == [Swap(1, 0)]


@given(
    heat=st.lists(st.lists(st.floats(0, 100), min_size=6, max_size=6), min_size=3, max_size=3),
    inside=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=3, max_size=3),
    count=st.integers(0, 20),
)
def test_swaps_are_disjoint_within_a_layer_and_never_make_the_cache_colder(
    heat: list[list[float]], inside: list[list[bool]], count: int
) -> None:
    table, mask = np.array(heat), np.array(inside)
    swaps = choose_swaps(table, mask, count)
    assert len(swaps) <= count
    named = [expert for swap in swaps for expert in swap]
    assert len(named) == len(set(named))
    for promoted, victim in swaps:
        assert promoted // 6 == victim // 6
        assert not mask.ravel()[promoted]
        assert mask.ravel()[victim]
        assert table.ravel()[promoted] > table.ravel()[victim]


def test_a_skewed_conversation_is_learnt() -> None:
    """Picks follow a power law that the cache does not know at first: the hit rate nears the best possible one."""
    random = np.random.default_rng(0)
    chance = 1.0 / np.arange(1, 65) ** 1.2
    chance /= chance.sum()
    order = random.permutation(64)
    inside = np.zeros((1, 64), bool)
    inside[0, :16] = True
    best = chance[:16].sum()
    heat, hits = np.zeros((1, 64)), 0
    for round_number in range(200):
        fresh = np.zeros((1, 64), np.int64)
        for _ in range(8):
            for pick in random.choice(64, 4, p=chance):
                fresh[0, order[pick]] += 1
                hits += int(inside[0, order[pick]] and round_number >= 100)
        heat = decay_counts(heat, fresh)
        for promoted, victim in choose_swaps(heat, inside, 4):
            inside[0, promoted], inside[0, victim] = True, False
    assert hits / (100 * 32) > 0.9 * best


def test_the_share_of_the_link_is_a_function_of_the_lists() -> None:
    assert split_pinned(6, 4, 0.0) == 0
    assert split_pinned(6, 4, 0.5) == 5
    assert split_pinned(6, 4, 1.0) == 6
    assert split_pinned(0, 10, 0.7) == 0
    assert split_pinned(3, 0, 0.5) == 2


@given(st.integers(0, 80), st.integers(0, 80), st.floats(0, 1, width=32))
def test_whoever_ends_later_ends_as_early_as_whole_experts_allow(pinned: int, cpu: int, fraction: float) -> None:
    """Against all other splits: at ``fraction`` of both rates the link, at the rest the CPU."""
    taken = split_pinned(pinned, cpu, fraction)
    link, rest = Fraction(fraction), 1 - Fraction(fraction)

    def end(count: int) -> Fraction | float:
        by_link = count / link if link else (math.inf if count else 0)
        left = pinned + cpu - count
        return max(by_link, left / rest if rest else (math.inf if left else 0))

    best = min(end(count) for count in range(pinned + 1))
    assert 0 <= taken <= pinned
    assert end(taken) == best or math.isclose(end(taken), best, rel_tol=1e-12)


def test_a_fixed_share_of_the_link_is_of_the_page_locked_misses_alone() -> None:
    assert [split_pinned(6, others, 0.5, balance=False) for others in (0, 4, 100)] == [3, 3, 3]
    assert [split_pinned(6, others, 0.5, balance=True) for others in (0, 4, 100)] == [3, 5, 6]
    assert split_pinned(6, 4, 0.0, balance=False) == 0
    assert split_pinned(6, 4, 1.0, balance=False) == 6
    assert split_pinned(0, 4, 1.0, balance=False) == 0


@given(
    layers=st.integers(1, 5), experts=st.integers(1, 18), most=st.integers(0, 24), drafts=st.integers(0, 2),
    levels=st.integers(1, 30), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_swaps_are_those_of_sorting_every_row(
    layers: int, experts: int, most: int, drafts: int, levels: int, seed: int
) -> None:
    """The definition, with all rows sorted whole; ties are common."""
    random = np.random.default_rng(seed)
    heat = random.integers(0, levels, (layers, experts)).astype(np.float64)
    inside = random.random((layers, experts)) < random.random()
    wanted = []
    for layer in range(layers):
        here = range(layer * experts, (layer + 1) * experts)
        flat, owned = heat.reshape(-1), inside.reshape(-1)
        coldest = sorted((e for e in here if owned[e]), key=lambda e: flat[e])[:most]
        hottest = sorted((e for e in here if not owned[e]), key=lambda e: -flat[e])[:most]
        for victim, promoted in zip(coldest, hottest, strict=False):
            gain = flat[promoted] - flat[victim]
            if flat[promoted] < flat[victim] * HYSTERESIS_RATIO or gain < HYSTERESIS_PICKS:
                break
            wanted.append((layer >= layers - drafts, -gain, layer, Swap(promoted, victim)))
    assert choose_swaps(heat, inside, most, drafts) == [swap for *_, swap in sorted(wanted)[:most]]
