"""The sampler against a plain float64 mirror written from its documented order, and by counting draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.sampler import Sampler, Workspace, distribution, draw, ranked, token_logprobs
from strata.engine.sampling_params import SamplingParams
from strata.errors import EngineError


def mirror(logits: np.ndarray, params: SamplingParams, prompt: list[int], said: list[int]) -> dict[int, float]:
    """Probability of each id that may be drawn: step by step, over Python lists, sorting everything."""
    values = [float(value) for value in logits]
    for id_, bias in params.logit_bias.items():
        values[id_] += bias
    for id_ in set(prompt) | set(said):
        scale = params.repetition_penalty
        values[id_] = values[id_] / scale if values[id_] > 0 else values[id_] * scale
    for id_ in set(said):
        values[id_] -= params.frequency_penalty * said.count(id_) + params.presence_penalty
    order = sorted(range(len(values)), key=lambda id_: (-values[id_], id_))
    if params.temperature == 0:
        return {order[0]: 1.0}
    best = values[order[0]]
    weight = {id_: math.exp((values[id_] - best) / params.temperature) for id_ in order}
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, mass, kept = math.fsum(weight[id_] for id_ in order), 0.0, []
        for id_ in order:
            kept.append(id_)
            mass += weight[id_]
            if mass >= params.top_p * total:
                break
        order = kept
    order = [id_ for id_ in order if weight[id_] >= params.min_p]
    total = math.fsum(weight[id_] for id_ in order)
    return {id_: weight[id_] / total for id_ in order}


@st.composite
def rows(draw_: st.DrawFn) -> np.ndarray:
    """Few distinct values: ties are what goes wrong."""
    values = draw_(st.lists(st.sampled_from([-30.0, -2.5, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=24))
    return np.array(values, dtype=np.float32)


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 2, 5, 30]),
        "top_p": st.sampled_from([0.0, 0.31, 0.77, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.07, 0.53, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "logit_bias": st.sampled_from([{}, {0: 2.25, 1: -100.0}]),
    }
)


@settings(max_examples=400)
@given(rows(), options, st.lists(st.integers(0, 1), max_size=4), st.lists(st.integers(0, 1), max_size=4))
def test_distribution_equals_the_mirror(
    logits: np.ndarray, given_: dict[str, Any], prompt: list[int], said: list[int]
) -> None:
    params = SamplingParams(**given_)
    sampler = Sampler(params, prompt)
    for token in said:
        sampler.accept(token)
    ids, weights = distribution(sampler._adjusted(logits), params)
    expected = mirror(logits, params, prompt, said)
    ids = np.arange(len(logits)) if ids is None else ids
    assert ids.tolist() == sorted(expected)
    for id_, weight in zip(ids, weights / weights.sum(), strict=True):
        assert weight == pytest.approx(expected[int(id_)], rel=1e-12)


def test_top_p_over_a_wide_vocabulary_equals_the_mirror() -> None:
    """Wider than the first steps of the ranking: flat rows need thousands of ids."""
    rng = np.random.default_rng(3)
    for spread in (0.01, 0.5, 4.0):
        logits = rng.normal(0, spread, 5000).astype(np.float32).round(2)
        for top_p in (0.5, 0.99, 0.999999):
            params = SamplingParams(top_p=top_p)
            ids, _ = distribution(logits, params)
            assert ids is not None
            assert ids.tolist() == sorted(mirror(logits, params, [], []))


@pytest.mark.parametrize(
    "given_",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}],
)
def test_draws_follow_the_distribution(given_: dict[str, Any]) -> None:
    """6,000 draws with a fixed seed: chi-square below the 99.9 % point of its degrees of freedom."""
    logits = np.array([2.0, 1.0, 0.0, 1.0, -1.0, 0.5, -3.0, 1.5], dtype=np.float32)
    params = SamplingParams(seed=11, **given_)
    expected = mirror(logits, params, [], [])
    sampler, count, draws = Sampler(params), dict.fromkeys(expected, 0), 6_000
    for _ in range(draws):
        token = sampler.pick(logits).token
        sampler.accept(token)
        count[token] += 1
    square = sum((count[id_] - draws * share) ** 2 / (draws * share) for id_, share in expected.items())
    limit = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}
    assert len(expected) > 1
    assert square < limit[len(expected) - 1]


# Seeds


def test_a_seed_means_the_same_tokens_whatever_the_batch() -> None:
    rng = np.random.default_rng(0)
    rows_TV = rng.normal(0, 2, (12, 500)).astype(np.float32)
    params = SamplingParams(seed=7, temperature=0.9, top_p=0.9, presence_penalty=0.5)

    def alone() -> list[int]:
        sampler = Sampler(params)
        said = []
        for row in rows_TV:
            said.append(sampler.pick(row).token)
            sampler.accept(said[-1])
        return said

    solo = alone()
    neighbours = [Sampler(SamplingParams(seed=seed)) for seed in (7, 8, None)]
    sampler, said = Sampler(params), []
    for row in rows_TV:
        for neighbour in neighbours:
            neighbour.accept(neighbour.pick(row * 0.5).token)
        sampler.pick(row)  # asked twice, as when a draft is verified again: the same answer
        said.append(sampler.pick(row).token)
        sampler.accept(said[-1])
    assert said == solo
    assert alone() == solo
    assert len(set(solo)) > 6
    other = Sampler(SamplingParams(seed=8, temperature=0.9, top_p=0.9, presence_penalty=0.5))
    assert [other.pick(row).token for row in rows_TV] != solo


def test_a_fresh_seed_is_drawn_and_can_be_used_again() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    first, second = Sampler(SamplingParams()), Sampler(SamplingParams())
    assert first.seed != second.seed
    again = Sampler(SamplingParams(seed=first.seed))
    assert again.pick(logits) == first.pick(logits)


# Ties, greedy, ends of the range


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([0, 3, 1, 3, 3], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=0))
    assert sampler.pick(logits).token == 1
    assert sampler.pick(torch.from_numpy(logits)).token == 1
    assert Sampler(SamplingParams(top_k=1)).pick(logits).token == 1
    assert Sampler(SamplingParams(top_p=0)).pick(logits).token == 1


@settings(max_examples=100)
@given(st.lists(st.tuples(rows(), options), min_size=2, max_size=5))
def test_arrays_used_again_hold_nothing_of_the_row_before(rounds: list[tuple[np.ndarray, dict[str, Any]]]) -> None:
    """One workspace for rows of several widths and settings: each draw equals a draw in fresh memory."""
    work = Workspace()
    for logits, given_ in rounds:
        params = SamplingParams(**given_)
        ids, weights = distribution(logits, params, work)
        drawn = draw(ids, weights, 0.6180339887, work)
        assert drawn == draw(*distribution(logits, params), 0.6180339887)
        assert token_logprobs(logits, drawn, 3, work) == token_logprobs(logits, drawn, 3)


def test_greedy_does_not_change_the_row_and_obeys_penalties() -> None:
    logits = np.array([1.0, 0.9, 0.0], dtype=np.float32)
    before = logits.copy()
    sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=0.2))
    said = []
    for _ in range(4):
        said.append(sampler.pick(logits).token)
        sampler.accept(said[-1])
    assert said == [0, 1, 0, 1]
    assert np.array_equal(logits, before)


@settings(max_examples=200)
@given(rows(), st.integers(1, 30))
def test_ranked_is_a_stable_sort(logits: np.ndarray, count: int) -> None:
    assert ranked(logits, count).tolist() == sorted(range(len(logits)), key=lambda id_: (-logits[id_], id_))[:count]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([-3e38, 5.0, 3e38, 4.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1))
    assert sampler.pick(logits).token == 2


def test_draw_stays_inside_for_every_number() -> None:
    ids, weights = np.array([3, 5, 9]), np.array([0.1, 0.2, 0.0])
    assert draw(ids, weights, 0.0) == 3
    assert draw(ids, weights, 0.34) == 5
    assert draw(ids, weights, 1 - 2**-53) == 5
    assert draw(ids, np.array([0.0, 0.0, 1.0]), 0.0) == 9
    assert draw(None, weights, 0.34) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_request(bad: float, temperature: float) -> None:
    logits = np.zeros(50, dtype=np.float32)
    logits[17] = bad
    with pytest.raises(
        EngineError, match=r"row 3 of request 9: 1 of 50 logits are not finite, first -?(nan|inf) at id 17"
    ):
        Sampler(SamplingParams(temperature=temperature)).pick(logits, row="3 of request 9")


# Ends


def test_end_ids_are_forbidden_while_they_must_be() -> None:
    logits = np.array([9.0, 8.0, 1.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,)), end_ids=[0, 77])
    said = []
    for _ in range(3):
        said.append(sampler.pick(logits).token)
        sampler.accept(said[-1])
    assert said == [2, 2, 0]
    ignoring = Sampler(SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(1,)), end_ids=[0])
    assert ignoring.pick(logits).token == 1, "the request's own end still ends it"


# Log-probabilities


@given(rows(), st.integers(0, 8))
def test_logprobs_equal_torch(logits: np.ndarray, count: int) -> None:
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    params = SamplingParams(temperature=0, logprobs=count, logit_bias={0: 5.0})
    choice = Sampler(params).pick(logits)
    assert choice.logprob == pytest.approx(float(expected[choice.token]), abs=1e-12)
    order = sorted(range(len(logits)), key=lambda id_: (-logits[id_], id_))[:count]
    assert [id_ for id_, _ in choice.top] == order
    assert [value for _, value in choice.top] == pytest.approx([float(expected[id_]) for id_ in order], abs=1e-12)


def test_logprobs_are_left_out_unless_asked_for() -> None:
    logits = np.array([1.0, 2.0], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0)).pick(logits).logprob is None
    logprob, top = token_logprobs(logits, 0, 5)
    assert logprob == pytest.approx(-math.log(1 + math.e))
    assert [id_ for id_, _ in top] == [1, 0]
