"""Statistics as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from strata.stats import difference, flatten


@dataclass(frozen=True)
class Tier:
    hits: int
    seconds: float = 0.0
    name: str = "ram"
    is_pinned: bool = True


@dataclass(frozen=True)
class Store:
    tiers: dict[str, Tier]
    by_layer: tuple[int, ...] = ()
    last: None = None


def test_flatten_keeps_numbers_with_their_path() -> None:
    store = Store({"slots": Tier(3, 0.5), "file": Tier(1)}, (7, 8))
    assert flatten(store) == {
        "tiers.slots.hits": 3,
        "tiers.slots.seconds": 0.5,
        "tiers.file.hits": 1,
        "tiers.file.seconds": 0.0,
        "by_layer.0": 7,
        "by_layer.1": 8,
    }


def test_difference_counts_new_names_from_zero() -> None:
    assert difference(Store({"a": Tier(5)}, (1,)), Store({"a": Tier(2)})) == {
        "tiers.a.hits": 3,
        "tiers.a.seconds": 0.0,
        "by_layer.0": 1,
    }


def test_what_is_no_number_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"tiers\.x holds a set"):
        flatten({"tiers": {"x": {1}}})
