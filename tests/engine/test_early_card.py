"""A command opens the card that was asked for before it imports and loads, and lets it go after."""

from __future__ import annotations

from typing import Any

import pytest

from strata.cli.loading import load_engine
from strata.config_sources import resolve_here
from strata.engine import early_card
from strata.engine.engine import Engine


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []

    class Block:
        def __init__(self, index: int | None) -> None:
            found.append(index)

        def __enter__(self) -> None:
            found.append("begin")

        def __exit__(self, *_: object) -> None:
            found.append("end")

    def load(**_: Any) -> None:
        found.append("load")
        if len(found) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(early_card, "EarlyStart", Block)
    monkeypatch.setattr(Engine, "load", load)
    return found


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:2", 2), ("cpu", None)])
def test_the_card_of_the_option_is_open_while_an_engine_is_loaded(
    device: str, index: int | None, events: list[object]
) -> None:
    load_engine(resolve_here(arguments={"device": device}))
    assert events == [index, "begin", "load", "end"]


def test_a_process_that_may_map_little_opens_none(events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_card.system, "address_space_limit", lambda: 10**9)
    load_engine(resolve_here(arguments={"device": "cuda"}))
    assert events[0] is None


def test_a_load_that_is_interrupted_lets_the_card_go(events: list[object]) -> None:
    events.append("before")
    with pytest.raises(KeyboardInterrupt):
        load_engine(resolve_here(arguments={"device": "cuda"}))
    assert events[1:] == [0, "begin", "load", "end"]
