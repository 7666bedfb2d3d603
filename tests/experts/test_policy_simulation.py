"""Simulated cache policies against plain ones written another way, and against what no policy can pass."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata.experts.policy_simulation import POLICIES, count_picks, simulate

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def make_trace(seed: int, rounds: int) -> NDArray[np.int64]:
    """Picks that are skewed and change half-way, distinct within a layer's round."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(EXPERTS, 0.5), size=(2, LAYERS)) + 1e-3
    weights /= weights.sum(-1, keepdims=True)
    return np.array(
        [
            [rng.choice(EXPERTS, TOP_K, replace=False, p=weights[int(r >= rounds // 2), layer])
             for layer in range(LAYERS)] for r in range(rounds)
        ]
    )  # fmt: skip


def flat(trace: NDArray[np.int64]) -> list[int]:
    return (trace + np.arange(LAYERS)[None, :, None] * EXPERTS).ravel().tolist()


def best_possible(picks: list[int], num_slots: int) -> int:
    """Most hits of any choice of slots: every set that could be held is tried (dynamic programming)."""
    from itertools import combinations

    everyone = range(LAYERS * EXPERTS)

    @cache
    def most(at: int, held: frozenset[int]) -> int:
        if at == len(picks):
            return 0
        pick = picks[at]
        if pick in held:
            return 1 + most(at + 1, held)
        return max([most(at + 1, held), *(most(at + 1, held - {one} | {pick}) for one in held)])

    return max(most(0, frozenset(start)) for start in combinations(everyone, num_slots))


@given(seed=st.integers(0, 10_000), num_slots=st.integers(0, 3))
def test_clairvoyant_hits_what_the_best_possible_hits(seed: int, num_slots: int) -> None:
    trace = make_trace(seed, 3)
    heat = np.zeros((LAYERS, EXPERTS))
    assert simulate("clairvoyant", trace, heat, num_slots).hits == best_possible(flat(trace), num_slots)


@given(seed=st.integers(0, 10_000), num_slots=st.integers(0, LAYERS * EXPERTS))
def test_least_recent_is_a_list_in_order_of_use(seed: int, num_slots: int) -> None:
    trace = make_trace(seed, 12)
    heat = np.random.default_rng(seed).random((LAYERS, EXPERTS))
    held = sorted(range(heat.size), key=lambda e: -heat.ravel()[e])[:num_slots]  # most recent first
    hits = 0
    for pick in flat(trace):
        hits += pick in held
        if num_slots:
            held = [pick, *(one for one in held if one != pick)][:num_slots]
    run = simulate("lru", trace, heat, num_slots)
    assert run.hits == hits
    assert run.loads == (trace.size - hits if num_slots else 0)


@given(seed=st.integers(0, 10_000), num_slots=st.integers(0, LAYERS * EXPERTS))
def test_a_fixed_profile_hits_the_picks_of_its_hottest(seed: int, num_slots: int) -> None:
    trace = make_trace(seed, 20)
    heat = count_picks(trace, EXPERTS).astype(np.float64)
    run = simulate("profile", trace, heat, num_slots)
    assert run.hits == sum(sorted(heat.ravel().tolist(), reverse=True)[:num_slots])
    assert run.loads == 0


def test_decayed_counts_follow_a_change_that_a_fixed_profile_cannot() -> None:
    first = np.tile(np.array([[[0, 1], [0, 1]]]), (64, 1, 1))
    second = np.tile(np.array([[[2, 3], [2, 3]]]), (64, 1, 1))
    trace, heat = np.concatenate([first, second]), np.zeros((LAYERS, EXPERTS))
    fixed = simulate("profile", trace, heat, 4, adapt_every=4, adapt_swaps=4)
    moving = simulate("decayed", trace, heat, 4, adapt_every=4, adapt_swaps=4)
    still = simulate("decayed", trace, heat, 4, adapt_every=4, adapt_swaps=0)
    assert fixed.hit_rate == 0.5
    assert still.hits == fixed.hits
    assert moving.hits == trace.size - second[:28].size  # half is forgotten after seven adaptations of four rounds
    assert moving.loads == 4


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_all_slots_hit_always_and_none_never(policy: str) -> None:
    trace = make_trace(1, 30)
    heat = count_picks(trace[:10], EXPERTS).astype(np.float64)
    assert simulate(policy, trace, heat, heat.size).hit_rate == 1.0
    assert simulate(policy, trace, heat, 0).hits == 0
    ceiling = simulate("clairvoyant", trace, heat, 3).hits
    assert simulate(policy, trace, heat, 3).hits <= ceiling
