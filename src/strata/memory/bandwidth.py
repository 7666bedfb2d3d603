"""Measures what this machine's memory and drive give: reading RAM, copying it, reading files in pieces like experts.

Lives in ``memory`` because page caches and direct reads are the operating system's. Each rate is the mean of many
short passes, stalls left out: a round of a model is a sum of such. It must not know models; that pieces are as large as
experts is a size that it is given.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from strata.files import open_regular
from strata.kernels.cpu.library import check, declare
from strata.kernels.cpu.stager import Stager
from strata.memory.stager_sizing import count_threads
from strata.memory.system import system
from strata.memory.touching import Touching
from strata.stats import steady_mean

__all__ = [
    "PIECE_BYTES",
    "STAGER_THREADS",
    "Bandwidths",
    "choose_stager_threads",
    "measure_bandwidths",
    "measure_memory_read",
    "scratch_file",
]

PIECE_BYTES = 2_764_800  # an expert of 640 x 2560 in NVFP4: 675 pages
# Memory is read and copied in parts of about a millisecond, one after another so that none is in a cache still.
PART_BYTES = 16 << 20
STAGER_THREADS = 4
IN_FLIGHT = 16  # pieces that are under way at once, as many as the fewest staging buffers
STAGER_STEPS = (4, 6, 8, 12, 16)  # threads that are tried for staging, from the rule's number on
STAGER_GAIN = 1.03  # the least by which more threads must raise the staged rate
LEAVE_FREE = 1 << 30  # of the drive
FILLING_THREADS = 8  # a load waits for this


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second; ``memory_copy`` by ``STAGER_THREADS`` threads, ``single_copy`` by the one that asks for it, as a
    device made of RAM copies. ``stager_threads``: as many as still make staging from RAM faster.

    None: not measured, because the drive has no room or does not read past its cache.
    """

    memory_read: float
    memory_copy: float
    single_copy: float
    stager_threads: int
    mapped_read: float | None
    drive_pieces: float | None


def measure_bandwidths(
    folder: Path,
    *,
    num_threads: int,
    num_cpus: int,
    sample: Path | None = None,
    size_bytes: int = 192 << 20,
    passes: int = 3,
) -> Bandwidths:
    """Reads and copies ``size_bytes`` of RAM, and as much of the file ``sample``, which is a model's own: it lies where
    the model lies, and as the system keeps it. Else of a file in ``folder``, which is removed again.

    ``num_threads`` is the pool's, which must have been configured; ``num_cpus`` bounds the stager's. ``size_bytes``
    should be several times the last cache. Raises ``MemoryError`` where RAM is short.
    """
    assert num_threads >= 1, "the pool of the native kernels is configured"
    pieces = size_bytes // PIECE_BYTES
    source = system.map_region(pieces * PIECE_BYTES, huge_pages=True)
    target = system.map_region(pieces * PIECE_BYTES, huge_pages=True)
    stager = Stager(STAGER_THREADS)
    try:
        _fill(source.address, source.nbytes)
        system.touch_pages(target.address, target.nbytes)
        parts = _parts(source.nbytes) * passes
        read = _steady(_sum(source.address + at) for at in parts)
        copied = _steady(_copy(stager, target.address + at, source.address + at) for at in parts)
        alone = _steady(_copy_alone(target.address + at, source.address + at) for at in parts)
        threads = choose_stager_threads(num_cpus, lambda number: _staged_rate(number, target, source, passes))
        mapped, from_drive = _measure_drive(folder, sample, stager, source, target, passes)
        return Bandwidths(read, copied, alone, threads, mapped, from_drive)
    finally:
        stager.close()
        source.free()
        target.free()


def measure_memory_read(*, size_bytes: int = 512 << 20, passes: int = 5) -> float:
    """Bytes a second of reading RAM with the pool's threads alone, the best of some passes: a ceiling.

    A pass reads all of it, more than a last cache holds, so that waking the threads is a small part. Raises
    ``MemoryError`` where RAM is short.
    """
    region = system.map_region(size_bytes, huge_pages=True)
    try:
        with Touching([(region.address, region.nbytes)], FILLING_THREADS) as touching:
            touching.wait(0)
        return max(_sum(region.address, region.nbytes) for _ in range(passes))
    finally:
        region.free()


def choose_stager_threads(num_cpus: int, rate: Callable[[int], float]) -> int:
    """Threads for staging from RAM: the rule's number, raised step by step while ``rate`` of it grows enough."""
    chosen = count_threads(num_cpus)
    best = 0.0
    for number in (chosen, *(step for step in STAGER_STEPS if chosen < step <= num_cpus)):
        found = rate(number)
        if found < STAGER_GAIN * best:
            break
        chosen, best = number, found
    return chosen


def _staged_rate(num_threads: int, target: system.Region, source: system.Region, passes: int) -> float:
    """Bytes a second that so many threads stage: all of ``source``, in pieces."""
    pieces = [(at, PIECE_BYTES) for at in range(0, source.nbytes - PIECE_BYTES + 1, PIECE_BYTES)]
    stager = Stager(num_threads)
    try:
        start = lambda at, n: stager.copy(target.address + at, source.address + at, n)  # noqa: E731
        return _steady(_rate(len(pieces) * PIECE_BYTES, lambda: _run(stager, pieces, start)) for _ in range(passes))
    finally:
        stager.close()


def _parts(nbytes: int) -> list[int]:
    return list(range(0, nbytes - PART_BYTES + 1, PART_BYTES))


def _sum(address: int, nbytes: int = PART_BYTES, *, advise: bool = False) -> float:
    """Rate of reading a part. ``advise``: as pages of a mapped file are read, asked for before."""
    add = declare("strata_memory_sum", ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
    total = ctypes.c_uint64()

    def work() -> None:
        if advise:
            system.advise(address, nbytes, "will_need")
        check(add(address, nbytes, ctypes.byref(total)))

    return _rate(nbytes, work)


def _copy(stager: Stager, target: int, source: int) -> float:
    pieces = [(at, PIECE_BYTES) for at in range(0, PART_BYTES - PIECE_BYTES + 1, PIECE_BYTES)]
    start = lambda at, n: stager.copy(target + at, source + at, n)  # noqa: E731
    return _rate(len(pieces) * PIECE_BYTES, lambda: _run(stager, pieces, start))


def _copy_alone(target: int, source: int) -> float:
    return _rate(PART_BYTES, lambda: ctypes.memmove(target, source, PART_BYTES))


def _fill(address: int, nbytes: int) -> None:
    """Bytes that no drive compresses: a random megabyte, over and over."""
    block = secrets.token_bytes(1 << 20)
    for at in range(0, nbytes, len(block)):
        ctypes.memmove(address + at, block, min(len(block), nbytes - at))


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - began)


def _steady(rates: Iterable[float]) -> float:
    """The rate of passes of one size, each at one of ``rates``."""
    return 1 / steady_mean([1 / rate for rate in rates])


def _run(stager: Stager, parts: list[tuple[int, int]], start: Callable[[int, int], int]) -> None:
    """Keeps ``IN_FLIGHT`` jobs under way until all are done."""
    tickets: list[int] = []
    for at, nbytes in parts:
        if len(tickets) == IN_FLIGHT:
            stager.wait(tickets.pop(0))
        tickets.append(start(at, nbytes))
    for ticket in tickets:
        stager.wait(ticket)


def _measure_drive(
    folder: Path, sample: Path | None, stager: Stager, source: system.Region, target: system.Region, passes: int
) -> tuple[float | None, float | None]:
    """(where a mapping shows the page cache, in pieces like experts past it)."""
    if sample is not None and sample.stat().st_size >= source.nbytes:
        return _measure_file(sample, stager, target, passes)
    with scratch_file(folder, source.address, source.nbytes) as path:
        return (None, None) if path is None else _measure_file(path, stager, target, passes)


def _measure_file(path: Path, stager: Stager, target: system.Region, passes: int) -> tuple[float | None, float | None]:
    """Both rates over pieces spread evenly over a file, as many as ``target`` holds."""
    number = target.nbytes // PIECE_BYTES
    step = path.stat().st_size // number // system.PAGE_BYTES * system.PAGE_BYTES
    pieces = [(index * step, PIECE_BYTES) for index in range(number)]
    place = {at: target.address + index * PIECE_BYTES for index, (at, _) in enumerate(pieces)}
    plain = open_regular(path)
    try:
        _run(stager, pieces, lambda at, n: stager.read(plain, at, place[at], n))  # into the cache
    finally:
        os.close(plain)
    mapping = system.map_file(path)
    for at, _ in pieces:  # pages are mapped at their first touch, which is a prompt's
        _sum(mapping.address + at, PIECE_BYTES, advise=True)
    mapped = _steady(_sum(mapping.address + at, PIECE_BYTES, advise=True) for at, _ in pieces * passes)
    mapping.free()
    try:
        direct = open_regular(path, system.direct_read_flag())
    except OSError:  # a file system in RAM has no drive to read past its cache
        return mapped, None
    scattered = sorted(pieces, key=lambda part: hash(part[0] * 0x9E3779B1) & 0xFFFF)
    try:
        read = lambda at, n: stager.read(direct, at, place[at], n)  # noqa: E731
        return mapped, _rate(number * PIECE_BYTES, lambda: _run(stager, scattered, read))
    finally:
        os.close(direct)


@contextmanager
def scratch_file(folder: Path, address: int, nbytes: int) -> Iterator[Path | None]:
    """A file of these bytes on the drive, gone afterwards; None where the drive would be left too little room."""
    if shutil.disk_usage(folder).free < nbytes + LEAVE_FREE:
        yield None
        return
    path = folder / f".bandwidth-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with path.open("wb") as handle:
            handle.write((ctypes.c_char * nbytes).from_address(address))
            handle.flush()
            os.fsync(handle.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)
