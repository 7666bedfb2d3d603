"""Bounds of what a request may ask, and the numbers behind a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.engine.philox import fresh_seed, philox_4x32, uniform
from strata.engine.sampling_params import SamplingParams
from strata.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, "0 to 100"),
        ("temperature", float("nan"), "a number from 0 to 100"),
        ("temperature", True, "a number"),
        ("temperature", "hot", "a number"),
        ("top_k", -2, "0 to"),
        ("top_k", 1.5, "a whole number"),
        ("top_p", 1.01, "0 to 1"),
        ("min_p", -1, "0 to 1"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -3, "-2 to 2"),
        ("repetition_penalty", 0, "0.01 to 100"),
        ("logit_bias", [1], "an object of token id to bias"),
        ("logit_bias", {"a": 1}, "a whole number"),
        ("logit_bias", {"-1": 1}, "a whole number"),
        ("logit_bias", {1: 101}, "-100 to 100"),
        ("logit_bias", dict.fromkeys(range(2000), 1), "at most 1024"),
        ("seed", 1 << 64, "to 18446744073709551615"),
        ("seed", 1.0, "a whole number"),
        ("logprobs", 21, "0 to 20"),
        ("max_tokens", 0, "1 to"),
        ("min_tokens", -1, "0 to"),
        ("stop", "", "1 to 1024 characters"),
        ("stop", [1], "1 to 1024 characters"),
        ("stop", {"a": 1}, "a string or a list"),
        ("stop", ["x" * 2000], "1 to 1024 characters"),
        ("stop", [str(n) for n in range(17)], "at most 16"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", ["5"], "a whole number"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_a_refusal_names_field_value_and_range(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    text = str(caught.value)
    assert text.startswith(field)
    assert words in text
    assert caught.value.http_status == 400
    assert len(text) < 300


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"min_tokens: 5 is not allowed .allowed: at most max_tokens = 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_values_are_put_into_one_shape() -> None:
    params = SamplingParams(
        temperature=0,
        top_k=-1,
        logit_bias={"7": 1},
        stop="a",
        stop_token_ids=[3, 3],
        seed=-1,
        max_tokens=4,  # type: ignore[arg-type, dict-item]
    )
    assert params.greedy
    assert not params.penalised
    assert (params.top_k, params.logit_bias, params.stop, params.stop_token_ids) == (0, {7: 1.0}, ("a",), (3,))
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")  # type: ignore[arg-type]
    assert SamplingParams(presence_penalty=1).penalised


def test_a_request_over_a_checkpoints_recommendations() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "unheard": 1}
    params = SamplingParams.from_request({"temperature": None, "top_p": 0.5, "seed": 3}, defaults)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.6, 20, 0.5, 3)
    with pytest.raises(RequestError, match=r"temprature: not a sampling parameter.*temperature"):
        SamplingParams.from_request({"temprature": 1})


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_vectors(counter: Any, key: Any, expected: tuple[int, ...]) -> None:
    assert philox_4x32(counter, key) == expected


def test_uniform_numbers_are_uniform_and_independent_of_each_other() -> None:
    numbers = np.array([uniform(5, position) for position in range(20_000)])
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    expected = len(numbers) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # 99.9 % point of 63 degrees of freedom
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 0.025
    assert abs(np.corrcoef(numbers, [uniform(6, position) for position in range(20_000)])[0, 1]) < 0.025


def test_every_bit_of_seed_and_position_counts() -> None:
    base = uniform(0, 0)
    assert (
        len({base, *(uniform(1 << bit, 0) for bit in range(64)), *(uniform(0, 1 << bit) for bit in range(64))}) == 129
    )
    assert uniform(-1, 0) == uniform((1 << 64) - 1, 0)


def test_fresh_seeds_are_fit_for_a_request() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
