"""Token ids over the whole vocabulary, made up by arithmetic: fixed lists that every machine and engine can make again.

Lives in ``engine`` beside the benchmark that forces them. A token's topic is part of its id
(``checkpoint.synthetic_routing``); the topic lasts for a few tokens, which is what makes rows repeat picks.
"""

from __future__ import annotations

from strata.checkpoint.synthetic_routing import STAY, num_topics

__all__ = ["token_list"]

_MASK = (1 << 64) - 1


def token_list(vocabulary: int, count: int, name: str) -> list[int]:
    """``count`` ids. Lists of different ``name`` have nothing to do with each other."""
    topics = num_topics(vocabulary)
    state = int.from_bytes(name.encode(), "little") & _MASK
    found, topic = [], 0
    for index in range(count):
        stay, choice, word = (_mixed(state + 3 * index + part + 1) for part in range(3))
        if index == 0 or stay >> 32 >= STAY * 2**32:
            topic = choice % topics
        members = (vocabulary - topic - 1) // topics + 1
        found.append(topic + topics * (word % members))
    return found


def _mixed(value: int) -> int:
    """A bijection of 64 bits without structure: two rounds of shift, xor and multiply by odd numbers."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    for multiplier in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        value ^= value >> 33
        value = (value * multiplier) & _MASK
    return value ^ (value >> 33)
