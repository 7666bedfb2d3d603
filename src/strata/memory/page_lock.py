"""Takes the RAM of an expert copy and page-locks as much of it as is granted: paths 1, 2 and 3, said in the log.

Lives in ``memory`` because the paths are rules about pages, drivers and limits. It hands back addresses and device
aliases by place; what lies in a place it must not know. A refusal is an answer here, never an error: the load goes on
with less, and nothing is registered again after the first refusal.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.errors import MemoryPlanError
from strata.kernels.backend import Backend, PinRefused
from strata.memory.locked_memory import LockedMemory, Slice
from strata.memory.requests import PinRequest
from strata.memory.system import system
from strata.memory.touching import Touching

__all__ = ["SYSTEM_LOCKS", "SystemLocks", "cut_slices", "take_memory"]

logger = logging.getLogger(__name__)
GIB = 1 << 30
MOST_TOUCH_THREADS = 16  # the most that page-locking touched huge pages was measured with
# Of the processors, so that the dense weights beside have some: with 12 of 16 a load of 50 GiB took 5.7 to 6.0 s, with
# 16 6.5 to 6.8 (h200).
TOUCH_SHARE = 0.75
TOUCH_IN_PARALLEL = 64 << 20
LEAST_COPY = 4 * GIB  # below it the slower way takes a few seconds at most
PROBE_BYTES = 2 << 20  # a huge page
SLOWER = "slices are faster"
NOT_LOCKED = "not locked in RAM"  # the system may swap it out, so it is always said


class SystemLocks:
    """The system's own page-locking for a device that is made of RAM (``kernels.host.PageLocks``)."""

    def lock(self, address: int, nbytes: int) -> None:
        try:
            system.lock_pages(address, nbytes)
        except system.LockRefused as refusal:
            raise PinRefused(nbytes, refusal.reason) from refusal

    def unlock(self, address: int, nbytes: int) -> None:
        system.unlock_pages(address, nbytes)


SYSTEM_LOCKS = SystemLocks()


def take_memory(
    backend: Backend,
    num_places: int,
    stride: int,
    request: PinRequest,
    *,
    limit: int | None = None,
    slice_bytes: int = GIB,
    needed: NDArray[np.bool_] | None = None,
    num_cpus: int = 1,
    level: int = logging.INFO,
    wait: bool = True,
) -> LockedMemory:
    """Memory for ``num_places`` of ``stride`` bytes, page-locked by the first path that works.

    ``limit``: at most so many bytes page-locked, None: until refused. ``slice_bytes``: about one layer. ``needed``
    (one flag a place): only these are worth locking. ``level``: of the log line that says what was reached. Without
    ``wait`` several slices are touched and, as soon as somebody waits for a place, locked by a thread that goes on
    after the return. Raises ``MemoryPlanError`` when even ordinary memory is refused.
    """
    nbytes = num_places * stride
    assert nbytes > 0, "a copy of nothing is not taken"
    began = time.perf_counter()
    whole = request.rule != "none" and (limit is None or limit >= nbytes) and needed is None and not request.partial
    threads = request.touch_threads
    if threads is None:
        threads = _touch_threads(num_cpus) if nbytes >= TOUCH_IN_PARALLEL else 1
    skipped, registers = "STRATA_PREFER_SLICES" if request.prefer_slices else "", request.rule != "none"
    if whole and not request.refuse_one_allocation and not skipped:
        if _prefers_slices(backend, request, nbytes):
            registers = _registers(backend, request)
            skipped = SLOWER if registers else ""
        taken = None if skipped else _take_path_1(backend, num_places, stride, began)
        if taken is not None:
            logger.log(level, "%s", taken.report)
            return taken
    cuts = cut_slices(num_places, stride, slice_bytes, system.PAGE_BYTES, needed) if registers else []
    wanted = _within(limit, cuts, stride)
    region = _map(nbytes, request)
    memory = LockedMemory(region, num_places, stride)
    memory.began = began
    locking = _Locking(memory, region, backend, request, wanted, len(cuts), threads, level, skipped)
    try:
        if wait or threads == 1 or len(wanted) < 2:
            memory.want()
            locking.run()
        else:
            memory.lock_beside(locking.run)
    except BaseException:
        memory.close()
        raise
    return memory


def _touch_threads(num_cpus: int) -> int:
    return min(num_cpus, MOST_TOUCH_THREADS, max(2, int(num_cpus * TOUCH_SHARE)))


def _prefers_slices(backend: Backend, request: PinRequest, nbytes: int) -> bool:
    """Where the user does not say: for a large copy on a card, since one allocation gave 0.8 to 2.4 GiB/s, whatever its
    size, and slices of touched huge pages 15 to 38 (h200)."""
    if request.prefer_slices is not None or nbytes < LEAST_COPY or not system.HAS_HUGE_PAGES:
        return False
    info = backend.info()
    return info.kind == "cuda" and not info.pins_charge_device


def _registers(backend: Backend, request: PinRequest) -> bool:
    """Whether the driver registers memory at all. A refusal is its last one: no slice is tried after it."""
    try:
        region = system.map_region(PROBE_BYTES, huge_pages=request.huge_pages)
    except MemoryError:
        return True  # the copy itself will say so
    try:
        system.touch_pages(region.address, region.nbytes)
        backend.register(region.address, region.nbytes).unregister()
    except PinRefused as refusal:
        logger.info("page-locking path 2 refused: %s", refusal)
        return False
    finally:
        region.free()
    return True


def _take_path_1(backend: Backend, num_places: int, stride: int, began: float) -> LockedMemory | None:
    nbytes = num_places * stride
    try:
        buffer, registration = backend.allocate_pinned(nbytes)
    except PinRefused as refusal:
        logger.info("page-locking path 1 refused: %s", refusal)
        return None
    if not registration.alias(buffer.address):
        registration.unregister()
        buffer.free()
        logger.info("page-locking path 1 refused: the allocation has no device alias")
        return None
    memory = LockedMemory(buffer, num_places, stride)
    memory.began, ended = began, time.perf_counter()
    memory.grant(Slice(0, nbytes, registration))
    report = _report(1, nbytes, nbytes, ended - began, f"{num_places:,} of {num_places:,} experts")
    memory.finish(1, report, ended)
    return memory


def _map(nbytes: int, request: PinRequest) -> system.Region:
    try:
        return system.map_region(nbytes, huge_pages=request.huge_pages)
    except MemoryError as error:
        raise MemoryPlanError(
            f"the system refuses memory for the experts: {error}",
            "raise its limit (ulimit -v, a container's), or use --resident-experts, --resident-budget-gib N or "
            "--mmap-experts",
            short_bytes=nbytes,
        ) from error


@dataclass(frozen=True)
class _Locking:
    """Paths 2 and 3: ordinary memory, registered slice by slice before anything is written to it. While one slice is
    registered the next ones are touched, and the ones before may be filled."""

    memory: LockedMemory
    region: system.Region
    backend: Backend
    request: PinRequest
    wanted: list[tuple[int, int]]  # (offset, bytes) of the slices to register
    num_cuts: int  # slices that the whole copy has
    touch_threads: int
    level: int
    skipped: str  # why path 1 was not tried

    def run(self) -> None:
        """All of it, in one thread. Leaves it half done where the memory is closed meanwhile."""
        memory = self.memory
        ranges = [(memory.address + offset, nbytes) for offset, nbytes in self.wanted]
        with Touching(ranges, self.touch_threads) as touching:
            memory.await_demand()
            for number, (offset, nbytes) in enumerate(self.wanted):
                memory.open_below(offset)
                touching.wait(number)
                if memory.is_closing:
                    return
                try:
                    registration = self.backend.register(memory.address + offset, nbytes)
                except PinRefused as refusal:
                    logger.info("page-locking stopped at slice %d of %d: %s", number, self.num_cuts, refusal)
                    break
                memory.grant(Slice(offset, nbytes, registration))
        self._finish()

    def _finish(self) -> None:
        memory, granted = self.memory, self.memory.slices
        num_pinned = int(np.count_nonzero(memory.aliases))
        rest = "" if num_pinned == memory.num_places else _lock_rest(self.region, granted)
        path = 2 if num_pinned else 3
        said = f"ordinary memory, {rest}"
        if path == 2:
            said = f"{len(granted):,} of {self.num_cuts:,} slices, {num_pinned:,} of {memory.num_places:,} experts"
            said += f", the rest {rest}" if rest else ""
        if self.skipped:
            said += f", path 1 not tried ({self.skipped})"
        ended = time.perf_counter()
        report = _report(path, num_pinned * memory.stride, memory.nbytes, ended - memory.began, said)
        if self.request.partial and num_pinned:
            report = report.replace("page-locking path 2", "page-locking path 2 (hottest prefix, STRATA_PARTIAL_PIN)")
        logger.log(max(self.level, logging.INFO) if NOT_LOCKED in report else self.level, "%s", report)
        memory.finish(path, report, ended)


def _within(limit: int | None, cuts: list[tuple[int, int]], stride: int) -> list[tuple[int, int]]:
    """The slices of ``cuts`` that ``limit`` bytes have room for; the last one as much of it as holds whole experts."""
    if limit is None:
        return cuts
    wanted, room = [], limit
    for offset, size in cuts:
        nbytes = min(size, _whole_places(offset, room, stride, system.PAGE_BYTES))
        if nbytes <= 0:
            break
        wanted.append((offset, nbytes))
        room -= nbytes
    return wanted


def cut_slices(
    num_places: int, stride: int, slice_bytes: int, page: int, needed: NDArray[np.bool_] | None = None
) -> list[tuple[int, int]]:
    """(offset, bytes) of slices: whole pages, disjoint, in order, cut at expert starts where these are page-aligned.

    Where no expert starts at a page boundary within a slice, the cut is the page boundary before one, and the expert
    across it belongs to no slice. ``needed`` leaves out places that are not worth locking.
    """
    flags = np.ones(num_places, bool) if needed is None else needed
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    step = max(1, slice_bytes // stride)
    aligned = page // math.gcd(stride, page)  # every so many experts, one starts at a page boundary
    step = max(1, step // aligned * aligned) if step >= aligned else step
    cuts = []
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        for start in range(first, end, step):
            stop = min(end, start + step)
            begin = -(-start * stride // page) * page if start == first else start * stride // page * page
            finish = stop * stride // page * page
            if stop == num_places:
                finish = -(-stop * stride // page) * page  # the region ends with a whole page
            if finish > begin:
                cuts.append((begin, finish - begin))
    return cuts


def _whole_places(offset: int, room: int, stride: int, page: int) -> int:
    """The most whole pages from ``offset`` on, within ``room`` bytes, that end at or after an expert's end."""
    pages = room // page * page
    if pages < stride and offset % stride == 0:
        return 0
    return pages


def _lock_rest(region: system.Region, granted: Sequence[Slice]) -> str:
    """Locks in RAM what no slice holds, and says how it went."""
    edges = [0, *(edge for part in granted for edge in (part.offset, part.offset + part.nbytes)), region.nbytes]
    locked = 0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if end > begin:
            try:
                system.lock_pages(region.address + begin, end - begin)
            except system.LockRefused as refusal:
                part = f"but for {locked / (1 << 20):.1f} MiB " if locked else ""
                return f"{part}{NOT_LOCKED} ({refusal.reason})"
            locked += end - begin
    return "locked in RAM"


def _report(path: int, pinned: int, nbytes: int, seconds: float, rest: str) -> str:
    unit, name = (GIB, "GiB") if nbytes >= GIB else (1 << 20, "MiB")
    sizes = f"{pinned / unit:.2f} of {nbytes / unit:.2f} {name} pinned"
    return f"page-locking path {path}: {sizes}, {rest}, {seconds:.1f} s"
