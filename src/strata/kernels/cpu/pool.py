"""Sizes and pins the native thread pool from what this process may use.

Lives beside the native kernels because they all share the one pool. The processors come from the affinity mask, the
number from the quota that the caller passes (only the memory room reads it); threads are laid over physical cores
first and round-robin over memory nodes, so that a few threads still see every node's bandwidth. It must not know what
jobs compute.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from strata.errors import ConfigError
from strata.kernels.cpu.library import check, declare

__all__ = [
    "PoolStatistics",
    "configure",
    "default_threads",
    "latency",
    "measure_busy",
    "order_cpus",
    "patience_us",
    "statistics",
    "threads",
    "usable_processors",
]

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class PoolStatistics:
    """``wakes``: times a worker slept and was woken; ``joins``: workers that took part, summed over jobs."""

    threads: int
    jobs: int
    wakes: int
    joins: int


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _node_of(cpu: int) -> int:
    for entry in sorted((_SYSTEM / "cpu" / f"cpu{cpu}").glob("node*")):
        return int(entry.name.removeprefix("node"))
    return 0


def _core_of(cpu: int) -> str:
    siblings = _read(_SYSTEM / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return siblings or str(cpu)


def order_cpus(cpus: dict[int, tuple[int, str]]) -> list[int]:
    """Processors in the order that threads take them. ``cpus``: id -> (memory node, name of its physical core).

    First one thread of each core, the nodes in turn; then the second threads of the cores, likewise.
    """
    seen: dict[str, int] = {}
    place: dict[tuple[int, int], int] = {}
    keys: list[tuple[int, int, int, int]] = []
    for cpu in sorted(cpus):
        node, core = cpus[cpu]
        sibling = seen.get(core, 0)
        seen[core] = sibling + 1
        index = place.get((node, sibling), 0)
        place[node, sibling] = index + 1
        keys.append((sibling, index, node, cpu))
    return [cpu for _, _, _, cpu in sorted(keys)]


def _allowed() -> dict[int, tuple[int, str]]:
    return {cpu: (_node_of(cpu), _core_of(cpu)) for cpu in os.sched_getaffinity(0)}


def default_threads(busy: int = 0, quota: float | None = None) -> int:
    """Threads when none are asked for: the physical cores of the affinity mask, at most what ``quota`` (processors'
    worth of time, None for no limit) and ``busy`` processors, which other threads of this process keep, leave."""
    allowed = _allowed()
    cores = len({core for _, core in allowed.values()})
    granted = len(allowed) if quota is None else min(len(allowed), quota)
    return max(1, min(cores, math.floor(granted) - busy))


def usable_processors() -> int:
    """Processors of this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def configure(asked: int | None = None) -> int:
    """(Re)starts the pool with ``asked`` threads (None: ``default_threads()``), the caller included. Returns them.

    Each worker is pinned to a processor of its own; more threads than processors run unpinned. Waits for a
    running job. Raises ``ConfigError`` for a number out of range.
    """
    number = default_threads() if asked is None else asked
    if not 1 <= number <= 256:
        raise ConfigError(
            f"--threads {number}: the thread pool holds 1 to 256", "give --threads a number from 1 to 256"
        )
    cpus = order_cpus(_allowed())
    pinned = cpus if number <= len(cpus) else []
    array = (ctypes.c_int * max(1, len(pinned)))(*pinned)
    start = declare("strata_pool_configure", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    check(start(number, array, len(pinned)))
    return number


def threads() -> int:
    """Threads of a job, the caller included; 1 until ``configure`` was called."""
    return int(declare("strata_pool_threads")())


def statistics() -> PoolStatistics:
    numbers = [ctypes.c_longlong() for _ in range(3)]
    read = declare("strata_pool_counters", *[ctypes.c_void_p] * 3, returns=None)
    read(*[ctypes.byref(number) for number in numbers])
    return PoolStatistics(threads(), *[number.value for number in numbers])


@contextmanager
def measure_busy() -> Iterator[Callable[[], list[float]]]:
    """Within it the pool measures; what it yields gives the seconds each thread has worked so far, the caller first.

    Work is the time inside tasks without waiting for other threads. Nothing is measured outside.
    """
    measure = declare("strata_pool_measure", ctypes.c_int, returns=None)
    read = declare("strata_pool_busy", ctypes.c_void_p, ctypes.c_int, returns=None)

    def seconds() -> list[float]:
        found = (ctypes.c_longlong * threads())()
        read(found, len(found))
        return [ns / 1e9 for ns in found]

    measure(1)
    try:
        yield seconds
    finally:
        measure(0)


def patience_us() -> float:
    """Microseconds that a worker looks for the next job now before it sleeps."""
    return float(declare("strata_pool_patience", returns=ctypes.c_long)()) / 1000


def latency(rounds: int = 200, pause_us: int = 0) -> tuple[float, float]:
    """Median and largest microseconds until all threads have joined an empty job, each after ``pause_us`` of rest."""
    median, largest = ctypes.c_double(), ctypes.c_double()
    measure = declare("strata_pool_latency", ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    check(measure(rounds, pause_us, ctypes.byref(median), ctypes.byref(largest)))
    return median.value, largest.value
