"""How a made-up router picks: shares of experts, the biases that give them, and how much a row repeats the row before.

Lives in ``checkpoint`` beside the source that writes these numbers into weights. Pure arithmetic on counts: a score is
bias + noise with a noise of standard deviation one, so an expert that is to be picked by a share p of the rows has the
bias that a normal number exceeds with chance p. Of the noise a part comes from the row's topic, which outlasts the row.
Decision record 0086 has the construction and what it was measured to give. It must not know tensors or names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from strata.errors import ConfigError

__all__ = [
    "HOT_PICKS",
    "HOT_SHARE",
    "REPEATS",
    "STAY",
    "Routing",
    "RoutingNumbers",
    "check_routing",
    "num_topics",
    "routing_numbers",
]

Routing = Literal["skewed", "independent", "uniform"]

HOT_SHARE = 0.17  # of the experts of a layer ...
HOT_PICKS = 0.72  # ... take this share of the picks
REPEATS = 0.40  # of a row's picks are picks of the row before
STAY = 0.8  # chance that a token has the topic of the token before
MOST_TOPICS = 256
_LARGEST = 0.5  # no expert is picked by more rows
_FLOOR = 0.6  # of the other experts' picks are spread evenly, so that every expert occurs

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RoutingNumbers:
    """By rank of an expert, hottest first. ``bias`` in standard deviations of the noise; ``topic``: the share of the
    noise's variance that comes from the topic."""

    bias: Numbers
    topic: Numbers


def check_routing(name: str) -> Routing:
    """``name`` as a routing. Raises ``ConfigError``."""
    for known in get_args(Routing):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"--routing {name!r} is not known", f"use one of {', '.join(get_args(Routing))}")


def num_topics(vocabulary: int) -> int:
    """Token ``id`` has topic ``id % num_topics``; a topic has enough tokens that one hardly follows itself."""
    return max(1, min(MOST_TOPICS, vocabulary // 64))


@cache
def routing_numbers(routing: Routing, num_experts: int, top_k: int) -> RoutingNumbers:
    """Rounded to 1/64, so that the last digit of a logarithm on some machine changes no weight."""
    if routing == "uniform":
        return RoutingNumbers(np.zeros(num_experts), np.zeros(num_experts))
    bias = _bias(_shares(num_experts, top_k))
    topic = np.zeros(num_experts)
    if routing == "skewed":
        topic[: _num_hot(num_experts)] = _hot_topic(bias, num_experts, top_k)
    return RoutingNumbers(bias, topic)


def _num_hot(num_experts: int) -> int:
    return max(1, round(HOT_SHARE * num_experts))


def _shares(num_experts: int, top_k: int) -> Numbers:
    """Zipf's law over ranks on an even floor, none above ``_LARGEST``; its exponent is what gives the hot theirs."""
    rank, hot = np.arange(1, num_experts + 1, dtype=np.float64), _num_hot(num_experts)
    floor = _FLOOR * (1 - HOT_PICKS) * top_k / max(1, num_experts - hot)

    def of(exponent: float) -> Numbers:
        low, high = 0.0, float(num_experts)
        for _ in range(60):
            middle = (low + high) / 2
            found = np.minimum(_LARGEST, floor + middle * rank**-exponent)
            low, high = (middle, high) if found.sum() < top_k else (low, middle)
        return np.minimum(_LARGEST, floor + high * rank**-exponent)

    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle)[:hot].sum() < HOT_PICKS * top_k else (low, middle)
    return of(high)


def _bias(shares: Numbers) -> Numbers:
    normal = NormalDist()
    return np.round(64 * np.array([normal.inv_cdf(min(0.99, share)) for share in shares])) / 64


def _hot_topic(bias: Numbers, num_experts: int, top_k: int) -> float:
    """The topic's share in the hot experts' noise that gives ``REPEATS``; 0 where chance alone gives as many."""
    low, high = 0.0, 0.95
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _repeats(bias, middle, num_experts, top_k) < REPEATS else (low, middle)
    return round(64 * low) / 64


def _repeats(bias: Numbers, topic: float, num_experts: int, top_k: int) -> float:
    """Expected share of picks that the row before has too: two scores of one topic are normal with correlation
    ``topic``, those of different topics independent."""
    hot = _num_hot(num_experts)
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    normal = NormalDist()
    alone = np.array([normal.cdf(value) for value in bias])
    given = (bias[:hot, None] + np.sqrt(topic) * points) / np.sqrt(1 - topic)
    chances = np.array([[normal.cdf(value) for value in row] for row in given])
    both = chances**2 @ (weights / weights.sum())
    kept = STAY * both + (1 - STAY) * alone[:hot] ** 2
    return float((kept.sum() + (alone[hot:] ** 2).sum()) / top_k)
