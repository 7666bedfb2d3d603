"""Statistics as plain numbers: what ``statistics()`` of any object becomes for metrics, tests and tables.

Lives on top because every room with state returns a frozen dataclass from ``statistics()`` and every reader (the
server's metrics, ``strata verify``, benchmarks) reads the same one. Knows no room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["difference", "flatten"]


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


def difference(after: object, before: object) -> dict[str, int | float]:
    """What was counted between two statistics of the same object. Names that appear later count from 0."""
    earlier = flatten(before)
    return {name: value - earlier.get(name, 0) for name, value in flatten(after).items()}
