"""Measures what this machine's memory and drive give: reading RAM, copying it, reading files in large pieces.

Lives in ``memory`` because page caches and direct reads are the operating system's. Each rate is the median of many
short passes: the best of them is what no round of a model ever sees. It must not know models; that pieces are as large
as experts is a size that it is given.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.library import check, declare
from strata.kernels.cpu.stager import Stager
from strata.memory.system import system

__all__ = ["PIECE_BYTES", "STAGER_THREADS", "Bandwidths", "measure_bandwidths"]

PIECE_BYTES = 2_764_800  # an expert of 640 x 2560 in NVFP4: 675 pages
SEQUENTIAL_BYTES = 8 << 20
# Memory is read and copied in parts of about a millisecond, one after another so that none is in a cache still.
PART_BYTES = 16 << 20
STAGER_THREADS = 4
IN_FLIGHT = 16  # pieces that are under way at once, as many as the fewest staging buffers
LEAVE_FREE = 1 << 30  # of the drive


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second; ``cached_read`` with ``STAGER_THREADS`` threads that verify what they read.

    None: not measured, because the drive has no room or does not read past its cache.
    """

    memory_read: float
    memory_copy: float
    cached_read: float | None
    mapped_read: float | None
    drive_sequential: float | None
    drive_pieces: float | None


def measure_bandwidths(folder: Path, *, num_threads: int, size_bytes: int = 192 << 20, passes: int = 3) -> Bandwidths:
    """Reads and copies ``size_bytes`` of RAM, and a file as large in ``folder``, which is removed again.

    ``num_threads`` is the pool's, which must have been configured. ``size_bytes`` should be several times the last
    cache. Raises ``MemoryError`` where RAM is short.
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
        read = median(_sum(source.address + at) for at in parts)
        copied = median(_copy(stager, target.address + at, source.address + at) for at in parts)
        drive = _measure_drive(folder, stager, source, target, passes)
        return Bandwidths(read, copied, *drive)
    finally:
        stager.close()
        source.free()
        target.free()


def _parts(nbytes: int) -> list[int]:
    return list(range(0, nbytes - PART_BYTES + 1, PART_BYTES))


def _sum(address: int, *, advise: bool = False) -> float:
    """Rate of reading a part. ``advise``: as pages of a mapped file are read, asked for piece by piece before."""
    add = declare("strata_memory_sum", ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
    total = ctypes.c_uint64()

    def work() -> None:
        for at in range(0, PART_BYTES, PIECE_BYTES) if advise else ():
            system.advise(address + at, PIECE_BYTES, "will_need")
        check(add(address, PART_BYTES, ctypes.byref(total)))

    return _rate(PART_BYTES, work)


def _copy(stager: Stager, target: int, source: int) -> float:
    pieces = [(at, PIECE_BYTES) for at in range(0, PART_BYTES - PIECE_BYTES + 1, PIECE_BYTES)]
    start = lambda at, n: stager.copy(target + at, source + at, n)  # noqa: E731
    return _rate(len(pieces) * PIECE_BYTES, lambda: _run(stager, pieces, start))


def _fill(address: int, nbytes: int) -> None:
    """Bytes that no drive compresses: a random megabyte, over and over."""
    block = secrets.token_bytes(1 << 20)
    for at in range(0, nbytes, len(block)):
        ctypes.memmove(address + at, block, min(len(block), nbytes - at))


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - began)


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
    folder: Path, stager: Stager, source: system.Region, target: system.Region, passes: int
) -> tuple[float | None, float | None, float | None, float | None]:
    """(through the page cache, where a mapping shows it, in large pieces past it, in pieces like experts past it)."""
    size = source.nbytes // SEQUENTIAL_BYTES * SEQUENTIAL_BYTES
    if shutil.disk_usage(folder).free < size + LEAVE_FREE:
        return None, None, None, None
    pieces = [(index * PIECE_BYTES, PIECE_BYTES) for index in range(size // PIECE_BYTES)]
    scattered = sorted(pieces, key=lambda part: hash(part[0] * 0x9E3779B1) & 0xFFFF)
    blocks = [(at, SEQUENTIAL_BYTES) for at in range(0, size, SEQUENTIAL_BYTES)]
    sums = {at: checksum_at(source.address + at, nbytes) for at, nbytes in pieces}
    with _file(folder, source.address, size) as path:
        plain = os.open(path, os.O_RDONLY)
        try:
            warm = lambda at, n: stager.read(plain, at, target.address + at, n, sums[at])  # noqa: E731
            parts = [scattered[first : first + 8] for first in range(0, len(scattered) - 7, 8)] * passes
            cached = median(_rate(len(part) * PIECE_BYTES, partial(_run, stager, part, warm)) for part in parts)
        finally:
            os.close(plain)
        mapping = system.map_file(path)
        mapped = median(_sum(mapping.address + at, advise=True) for at in _parts(mapping.nbytes) * passes)
        mapping.free()
        try:
            direct = os.open(path, os.O_RDONLY | system.direct_read_flag())
        except OSError:  # a file system in RAM has no drive to read past its cache
            return cached, mapped, None, None
        try:
            read = lambda at, n: stager.read(direct, at, target.address + at, n)  # noqa: E731
            sequential = _rate(size, lambda: _run(stager, blocks, read))
            return (
                cached,
                mapped,
                sequential,
                _rate(len(pieces) * PIECE_BYTES, lambda: _run(stager, scattered, read)),
            )
        finally:
            os.close(direct)


@contextmanager
def _file(folder: Path, address: int, nbytes: int) -> Iterator[Path]:
    """A file of these bytes on the drive, gone afterwards."""
    path = folder / f".bandwidth-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with path.open("wb") as handle:
            handle.write((ctypes.c_char * nbytes).from_address(address))
            handle.flush()
            os.fsync(handle.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)
