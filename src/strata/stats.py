"""Statistics as plain numbers: what ``statistics()`` of any object becomes for metrics, tests and tables.

Lives on top because every room with state returns a frozen dataclass from ``statistics()`` and every reader (the
server's metrics, ``strata verify``, benchmarks) reads the same one. Knows no room.
"""

from __future__ import annotations

import dataclasses
import statistics as numbers
from collections.abc import Mapping, Sequence

__all__ = ["difference", "flatten", "steady_mean"]

STALL = 3.0  # times the median: a pass that took longer stood still, because the system gave its processor away


def flatten(statistics: object, prefix: str = "") -> dict[str, int | float]:
    """Name -> number of every number in a dataclass or mapping, nested names joined by dots, in declared order.

    Texts, switches and None carry no quantity and are left out; a sequence is numbered from 0.
    """
    if isinstance(statistics, bool) or statistics is None or isinstance(statistics, str):
        return {}
    if isinstance(statistics, (int, float)):
        return {prefix: statistics}
    if dataclasses.is_dataclass(statistics) and not isinstance(statistics, type):
        items = [(one.name, getattr(statistics, one.name)) for one in dataclasses.fields(statistics)]
    elif isinstance(statistics, Mapping):
        items = [(str(key), value) for key, value in statistics.items()]
    elif isinstance(statistics, (list, tuple)):
        items = [(str(index), value) for index, value in enumerate(statistics)]
    else:
        raise TypeError(f"{prefix or 'statistics'} holds a {type(statistics).__name__}, which is no number")
    found: dict[str, int | float] = {}
    for name, value in items:
        found |= flatten(value, f"{prefix}.{name}" if prefix else name)
    return found


def steady_mean(seconds: Sequence[float]) -> float:
    """Mean of the passes that did not stand still: what one of many takes, however their times are spread.

    A median leaves out that half of the passes are slower; a plain mean doubles when the system is busy for a moment.
    """
    limit = STALL * numbers.median(seconds)
    return numbers.fmean(one for one in seconds if one <= limit)


def difference(after: object, before: object) -> dict[str, int | float]:
    """What was counted between two statistics of the same object. Names that appear later count from 0."""
    earlier = flatten(before)
    return {name: value - earlier.get(name, 0) for name, value in flatten(after).items()}
