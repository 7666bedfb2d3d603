"""Work on threads: results in order, errors and interruptions at once, torch's own threads left as they were."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from strata.checkpoint import in_order as module
from strata.checkpoint.in_order import in_order, worker_count
from tests.patience import PATIENCE_S


def test_results_come_in_order_and_few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "worker_count", lambda: 3)
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(30):
            drawn.append(number)
            yield number

    def work(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number * number

    for expected, got in enumerate(in_order(work, items())):
        assert got == expected * expected
        assert len(drawn) <= expected + 5
    assert drawn == list(range(30))


def test_nobody_waits_for_a_long_piece_where_all_may_be_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "worker_count", lambda: 2)
    others = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert others.wait(PATIENCE_S), "the others wait for the first"
        if number == 29:
            others.set()
        return number

    assert list(in_order(work, range(30), 30)) == list(range(30))


def test_the_first_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "worker_count", lambda: 2)
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    got: list[int] = []
    with pytest.raises(ValueError, match="three"):
        got.extend(in_order(work, range(100)))
    assert len(begun) < 10
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_torch_threads_are_left_alone() -> None:
    before = torch.get_num_threads()
    inside = list(in_order(lambda _: torch.get_num_threads(), range(5)))
    assert inside == [1] * 5
    assert torch.get_num_threads() == before
    assert 1 <= worker_count() <= 8
