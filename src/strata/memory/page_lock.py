"""Takes the RAM of an expert copy and page-locks as much of it as is granted: paths 1, 2 and 3, said in the log.

Lives in ``memory`` because the paths are rules about pages, drivers and limits. It hands back addresses and device
aliases by place; what lies in a place it must not know. A refusal is an answer here, never an error: the load goes on
with less, and nothing is registered again after the first refusal.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.errors import MemoryPlanError
from strata.kernels.backend import Backend, Buffer, PinRefused, Registration
from strata.memory.requests import PinRequest
from strata.memory.system import system

__all__ = ["SYSTEM_LOCKS", "LockedMemory", "SystemLocks", "cut_slices", "take_memory"]

logger = logging.getLogger(__name__)
GIB = 1 << 30
# Page-locking 16 GiB: 2.3 GiB/s for untouched pages, 20.4 for huge pages that 16 threads had touched.
MOST_TOUCH_THREADS = 16
TOUCH_IN_PARALLEL = 64 << 20
NOT_LOCKED = "not locked in RAM"  # the system may swap it out, so it is always said


@dataclass(frozen=True)
class Slice:
    """A registered part of a copy: whole pages shared with no other slice."""

    offset: int
    nbytes: int
    registration: Registration


class LockedMemory:
    """RAM for ``num_places`` experts of ``stride`` bytes, some of it page-locked. Owned by whoever took it.

    ``path`` is 1, 2 or 3; ``aliases`` holds for each place its address as the device sees it, 0 where no slice holds
    the place whole (the CPU computes it in rounds, the stager copies it in prompts).
    """

    def __init__(
        self,
        buffer: Buffer | system.Region,
        num_places: int,
        stride: int,
        path: int,
        slices: list[Slice],
        report: str,
        seconds: float,
    ) -> None:
        self._buffer = buffer
        self.address = buffer.address
        self.nbytes = num_places * stride
        self.num_places = num_places
        self.stride = stride
        self.path = path
        self.slices = tuple(slices)
        self.report = report
        self.seconds = seconds  # that taking and page-locking it took
        self.aliases = _find_aliases(num_places, stride, buffer.address, self.slices)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of places that are page-locked whole."""
        return int(np.count_nonzero(self.aliases)) * self.stride

    def close(self) -> None:
        """Unregisters, then frees. Nothing may be copying from or to it."""
        for part in self.slices:
            part.registration.unregister()
        self.slices = ()
        self._buffer.free()


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
) -> LockedMemory:
    """Memory for ``num_places`` of ``stride`` bytes, page-locked by the first path that works.

    ``limit``: at most so many bytes page-locked, None: until refused. ``slice_bytes``: about one layer. ``needed``
    (one flag a place): only these are worth locking. ``level``: of the log line that says what was reached. Raises
    ``MemoryPlanError`` when even ordinary memory is refused.
    """
    nbytes = num_places * stride
    assert nbytes > 0, "a copy of nothing is not taken"
    started = time.monotonic()
    whole = request.rule != "none" and (limit is None or limit >= nbytes) and needed is None and not request.partial
    if whole and not request.refuse_one_allocation and not request.prefer_slices:
        taken = _take_path_1(backend, num_places, stride, started)
        if taken is not None:
            logger.log(level, "%s", taken.report)
            return taken
    threads = request.touch_threads
    if threads is None:
        threads = min(num_cpus, MOST_TOUCH_THREADS) if nbytes >= TOUCH_IN_PARALLEL else 1
    region = _map(nbytes, request)
    taken = _take_slices(backend, region, num_places, stride, request, limit, slice_bytes, needed, threads, started)
    logger.log(max(level, logging.INFO) if NOT_LOCKED in taken.report else level, "%s", taken.report)
    return taken


def _take_path_1(backend: Backend, num_places: int, stride: int, started: float) -> LockedMemory | None:
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
    seconds = time.monotonic() - started
    report = _report(1, nbytes, nbytes, seconds, f"{num_places:,} of {num_places:,} experts")
    return LockedMemory(buffer, num_places, stride, 1, [Slice(0, nbytes, registration)], report, seconds)


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


def _take_slices(
    backend: Backend,
    region: system.Region,
    num_places: int,
    stride: int,
    request: PinRequest,
    limit: int | None,
    slice_bytes: int,
    needed: NDArray[np.bool_] | None,
    touch_threads: int,
    started: float,
) -> LockedMemory:
    """Paths 2 and 3: ordinary memory, registered slice by slice before anything is written to it."""
    nbytes = num_places * stride
    cuts = [] if request.rule == "none" else cut_slices(num_places, stride, slice_bytes, system.PAGE_BYTES, needed)
    granted: list[Slice] = []
    room = nbytes + system.PAGE_BYTES if limit is None else limit
    touched = False
    for offset, size in cuts:
        wanted = min(size, _whole_places(offset, room, stride, system.PAGE_BYTES))
        if wanted <= 0:
            break
        if not touched and touch_threads > 1:
            _touch(region.address, region.nbytes, touch_threads)
            touched = True
        try:
            registration = backend.register(region.address + offset, wanted)
        except PinRefused as refusal:
            logger.info("page-locking stopped at slice %d of %d: %s", len(granted), len(cuts), refusal)
            break
        granted.append(Slice(offset, wanted, registration))
        room -= wanted
    aliases = _find_aliases(num_places, stride, region.address, granted)
    num_pinned = int(np.count_nonzero(aliases))
    rest = "" if num_pinned == num_places else _lock_rest(region, granted)
    path = 2 if num_pinned else 3
    said = f"ordinary memory, {rest}"
    if path == 2:
        said = f"{len(granted):,} of {len(cuts):,} slices, {num_pinned:,} of {num_places:,} experts"
        said += f", the rest {rest}" if rest else ""
    if request.prefer_slices and path == 2:
        said += ", path 1 not tried (STRATA_PREFER_SLICES)"
    seconds = time.monotonic() - started
    report = _report(path, num_pinned * stride, nbytes, seconds, said)
    if request.partial and num_pinned:
        report = report.replace("page-locking path 2", "page-locking path 2 (hottest prefix, STRATA_PARTIAL_PIN)")
    return LockedMemory(region, num_places, stride, path, granted, report, seconds)


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


def _find_aliases(
    num_places: int, stride: int, address: int, slices: tuple[Slice, ...] | list[Slice]
) -> NDArray[np.uint64]:
    aliases = np.zeros(num_places, np.uint64)
    for part in slices:
        first = -(-part.offset // stride)
        end = min(num_places, (part.offset + part.nbytes) // stride)
        if end > first:
            base = part.registration.alias(address + first * stride)
            aliases[first:end] = base + np.arange(end - first, dtype=np.uint64) * np.uint64(stride)
    return aliases


def _lock_rest(region: system.Region, granted: list[Slice]) -> str:
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


def _touch(address: int, nbytes: int, num_threads: int) -> None:
    """First touch by several threads: page-locking touched huge pages ran 8 times faster than untouched small ones."""
    step = max(2 << 20, -(-nbytes // num_threads // (2 << 20)) * (2 << 20))
    with ThreadPoolExecutor(num_threads) as pool:
        run: Callable[[int], None] = lambda begin: system.touch_pages(address + begin, min(step, nbytes - begin))  # noqa: E731
        list(pool.map(run, range(0, nbytes, step)))


def _report(path: int, pinned: int, nbytes: int, seconds: float, rest: str) -> str:
    unit, name = (GIB, "GiB") if nbytes >= GIB else (1 << 20, "MiB")
    sizes = f"{pinned / unit:.2f} of {nbytes / unit:.2f} {name} pinned"
    return f"page-locking path {path}: {sizes}, {rest}, {seconds:.1f} s"
