"""Runs that go on in turns and meet."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from strata.engine.lockstep import run_together


def test_runs_take_turns_and_each_gets_its_own_answer() -> None:
    said: list[str] = []

    def work(name: str) -> Any:
        def run(meet: Any) -> str:
            for turn in range(3):
                said.append(f"{name}{turn}")
                assert meet((name, turn)) == f"{name}{turn}!"
            return name.upper()

        return run

    meetings = []

    def answer(brought: list[Any]) -> list[str]:
        meetings.append(list(brought))
        return [f"{name}{turn}!" for name, turn in brought]

    assert run_together([work("a"), work("b"), work("c")], answer) == ["A", "B", "C"]
    assert said == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    assert meetings[1] == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("fails", ["first", "second", "answer"])
def test_the_first_error_ends_all_runs(fails: str) -> None:
    before, ended = threading.active_count(), []

    def work(name: str) -> Any:
        def run(meet: Any) -> None:
            try:
                meet(name)
                if fails == name:
                    raise ValueError(name)
                meet(name)
                meet(name)
            finally:
                ended.append(name)

        return run

    def answer(brought: list[Any]) -> list[None]:
        if fails == "answer":
            raise ValueError("answer")
        return [None] * len(brought)

    with pytest.raises(ValueError, match=fails):
        run_together([work("first"), work("second")], answer)
    assert sorted(ended) == ["first", "second"]
    assert threading.active_count() == before
