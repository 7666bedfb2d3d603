"""The stager's threads: copies of any size and alignment, reads that succeed and fail in each way."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from strata.errors import EngineError
from strata.kernels.cpu import stager as module
from strata.kernels.cpu.checksum import checksum
from strata.kernels.cpu.stager import ReadFailure, Stager


@pytest.mark.parametrize("bypass", [False, True])
def test_copies_are_exact_at_any_size_and_alignment(bypass: bool) -> None:
    random = np.random.default_rng(0)
    source = random.integers(0, 256, 1 << 16, np.uint8)
    stager = Stager(3)
    for _ in range(300):
        size = int(random.integers(1, 5000))
        begin, end = random.integers(0, len(source) - size, 2)
        target = np.full(len(source), 7, np.uint8)
        ticket = stager.copy(target.ctypes.data + int(end), source.ctypes.data + int(begin), size, bypass_cache=bypass)
        stager.wait(ticket)
        assert (target[end : end + size] == source[begin : begin + size]).all()
        assert (target[:end] == 7).all()
        assert (target[end + size :] == 7).all()
    stager.close()


def test_many_jobs_complete_in_any_order_and_are_asked_for_in_any_order() -> None:
    source = np.arange(1 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    stager = Stager(4)
    piece = 1 << 12
    tickets = [
        stager.copy(target.ctypes.data + first, source.ctypes.data + first, piece)
        for first in range(0, len(source), piece)
    ]
    assert tickets == sorted(tickets)
    for ticket in tickets[::-1]:
        stager.wait(ticket)
        assert stager.query(ticket)
    assert (source == target).all()
    stager.close()


def test_reads_and_their_failures(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    path = tmp_path / "blob"
    path.write_bytes(data.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    target = np.zeros(60_000, np.uint8)
    stager = Stager(2)
    stager.wait(stager.read(descriptor, 1000, target.ctypes.data, 60_000, checksum(data[1000:61_000])))
    assert (target == data[1000:61_000]).all()
    for offset, expected, reason in ((50_000, None, "truncated"), (0, 123, "damaged"), (200_000, None, "truncated")):
        ticket = stager.read(descriptor, offset, target.ctypes.data, 60_000, expected)
        for ask in (stager.wait, stager.query):
            with pytest.raises(ReadFailure) as caught:
                ask(ticket)
            assert caught.value.reason == reason
    os.close(descriptor)
    with pytest.raises(ReadFailure, match="Bad file descriptor"):
        stager.wait(stager.read(descriptor, 0, target.ctypes.data, 10))
    stager.close()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 262_143, 262_144, 262_145, 1_000_001])
def test_cached_and_cold_parts_have_one_checksum(tmp_path: Path, size: int) -> None:
    """A checked read takes what the page cache has in pieces and the rest in one: the sum is of all bytes."""
    data = np.random.default_rng(size).integers(0, 256, size + 7, np.uint8)
    path = tmp_path / "blob"
    path.write_bytes(data.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    stager = Stager(1)
    for first_cold in (0, size // 2, size + 7):  # of the file; 0: all of it
        for offset in (0, 7):
            os.pread(descriptor, size + 7, 0)
            os.posix_fadvise(descriptor, first_cold, 0, os.POSIX_FADV_DONTNEED)
            target = np.zeros(size, np.uint8)
            stager.wait(
                stager.read(descriptor, offset, target.ctypes.data, size, checksum(data[offset : offset + size]))
            )
            assert (target == data[offset : offset + size]).all()
    stager.close()
    os.close(descriptor)


def test_closing_finishes_what_was_submitted_and_ends_the_threads() -> None:
    before = threading.active_count()
    source, target = np.ones(1 << 22, np.uint8), np.zeros(1 << 22, np.uint8)
    stager = Stager(2)
    for first in range(0, len(source), 1 << 18):
        stager.copy(target.ctypes.data + first, source.ctypes.data + first, 1 << 18)
    stager.close()
    stager.close()
    assert target.all()
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [0, -1, 1000])
def test_a_number_of_threads_out_of_range(threads: int) -> None:
    with pytest.raises(EngineError, match=f"{threads} stager threads"):
        Stager(threads)


def test_threads_that_cannot_be_started_have_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "declare", lambda *_, **__: lambda num_threads: None)
    with pytest.raises(EngineError) as caught:
        Stager(2)
    assert "ulimit -v, ulimit -u" in caught.value.hint
    assert "STRATA_STAGER_THREADS" in caught.value.hint
