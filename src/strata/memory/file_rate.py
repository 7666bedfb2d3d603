"""What a drive gives for files that are there: read once, in large pieces.

Lives in ``memory`` because page caches and direct reads are the operating system's. It must not know what the files
are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from strata.files import open_regular
from strata.kernels.cpu.stager import Stager
from strata.memory.system import system

__all__ = ["drop_caches", "read_rate"]

PIECE_BYTES = 8 << 20
IN_FLIGHT = 8  # pieces; drives want several reads at once


def drop_caches(files: Sequence[Path]) -> None:
    """Takes the files out of the page cache where the system can; what is not on the drive yet is written first."""
    for path in files:
        descriptor = open_regular(path)
        try:
            with suppress(OSError):  # a system on which it takes a descriptor to write by
                os.fsync(descriptor)
            system.drop_file_cache(descriptor)
        finally:
            os.close(descriptor)


def read_rate(files: Sequence[Path], most_bytes: int, *, direct: bool) -> float:
    """Bytes a second of reading the whole pages of these files, up to ``most_bytes``; 0 where ``direct`` (past the page
    cache) is refused."""
    stager = Stager(IN_FLIGHT)
    region = system.map_region(IN_FLIGHT * PIECE_BYTES)
    done, began = 0, time.perf_counter()
    try:
        for path in files:
            descriptor = system.open_direct(path) if direct else open_regular(path)
            if descriptor is None:
                return 0.0
            try:
                nbytes = min(path.stat().st_size, most_bytes - done) // system.PAGE_BYTES * system.PAGE_BYTES
                _read(stager, descriptor, region.address, nbytes)
                done += nbytes
            finally:
                os.close(descriptor)
        return done / (time.perf_counter() - began)
    finally:
        stager.close()
        region.free()


def _read(stager: Stager, descriptor: int, address: int, nbytes: int) -> None:
    tickets: list[int] = []
    for number, at in enumerate(range(0, nbytes, PIECE_BYTES)):
        if len(tickets) == IN_FLIGHT:
            stager.wait(tickets.pop(0))
        place = address + number % IN_FLIGHT * PIECE_BYTES
        tickets.append(stager.read(descriptor, at, place, min(PIECE_BYTES, nbytes - at)))
    for ticket in tickets:
        stager.wait(ticket)
