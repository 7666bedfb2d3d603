"""A file is read ahead in order, never far from its reader, and what goes wrong is nobody's error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.memory import read_ahead
from strata.memory.read_ahead import PIECE_BYTES, ReadAhead
from strata.memory.system import system
from tests.patience import PATIENCE_S

LIMIT_S = PATIENCE_S


class Asked:
    """Stands in for the system's call and says what it was asked for."""

    def __init__(self, answers: Callable[[int], bool] = lambda offset: True) -> None:
        self.parts: list[tuple[int, int]] = []
        self._answers = answers

    def __call__(self, descriptor: int, offset: int, nbytes: int) -> bool:
        self.parts.append((offset, nbytes))
        return self._answers(offset)

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while len(self.parts) < count:
            assert time.monotonic() < until, "it is not read ahead"
            time.sleep(0.001)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(10 * PIECE_BYTES + 5))
    return path


def test_the_whole_file_in_order(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(read_ahead.system, "read_ahead", asked)
    ahead = ReadAhead(file)
    asked.wait_for(11)
    ahead.close()
    ahead.close()
    assert asked.parts == [(piece * PIECE_BYTES, PIECE_BYTES) for piece in range(10)] + [(10 * PIECE_BYTES, 5)]


def test_it_waits_for_its_reader_and_ends_when_it_is_closed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, threads = Asked(), threading.active_count()
    monkeypatch.setattr(read_ahead.system, "read_ahead", asked)
    ahead = ReadAhead(file, distance=3 * PIECE_BYTES)
    asked.wait_for(3)
    time.sleep(0.05)
    assert len(asked.parts) == 3
    ahead.reached(2 * PIECE_BYTES)
    asked.wait_for(5)
    time.sleep(0.05)
    assert len(asked.parts) == 5
    ahead.close()
    assert threading.active_count() == threads


def test_a_system_that_takes_no_hint_is_asked_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(lambda offset: False)
    monkeypatch.setattr(read_ahead.system, "read_ahead", asked)
    ahead = ReadAhead(file)
    asked.wait_for(1)
    ahead.close()
    assert len(asked.parts) == 1


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_to_read_is_nobodys_error(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "none"
    if exists:
        path.touch()
    for one in (path, None):
        ahead = ReadAhead(one)
        ahead.reached(7)
        ahead.close()


def test_a_thread_that_cannot_be_had_is_nobodys_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead = ReadAhead(file)
    ahead.reached(1)
    ahead.close()


def test_the_systems_own_call(file: Path) -> None:
    with file.open("rb") as opened:
        assert system.read_ahead(opened.fileno(), 0, PIECE_BYTES)
        descriptor = opened.fileno()
    assert not system.read_ahead(descriptor, 0, PIECE_BYTES), "a closed file"
