"""The stages of a load and when each ran, some beside others: for a benchmark's line and record.

Lives on top because rooms that load hand one on. Knows no room and measures nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Stage", "Stages", "format_stages"]


class Stage(NamedTuple):
    """Seconds since the load began."""

    name: str
    begin: float
    end: float


class Stages:
    """Of the load that begins now. One thread writes it."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._found: list[Stage] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The block is the stage; one that an error ends is none."""
        began = time.perf_counter()
        yield
        self.add(name, began, time.perf_counter())

    def add(self, name: str, began: float, ended: float) -> None:
        """Of what ran elsewhere, by ``time.perf_counter``."""
        self._found.append(Stage(name, began - self.began, ended - self.began))

    def in_order(self) -> tuple[Stage, ...]:
        """By their begin."""
        return tuple(sorted(self._found, key=lambda stage: stage.begin))


def format_stages(stages: Iterable[Stage]) -> str:
    """'probe 0.01, card 0.52-1.40': seconds that a stage took; begin and end where it ran beside another."""
    found = list(stages)
    words = []
    for stage in found:
        beside = any(one is not stage and one.begin < stage.end and stage.begin < one.end for one in found)
        took = f"{stage.begin:.2f}-{stage.end:.2f}" if beside else f"{stage.end - stage.begin:.2f}"
        words.append(f"{stage.name} {took}")
    return ", ".join(words)
