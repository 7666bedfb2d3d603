"""How many threads, buffers and ring slots the prompt stream gets; pure, the rules of the memory guide.

Lives in ``memory`` because the planner reserves what these rules ask for. The figures behind them: with at most a
tenth of the bytes not page-locked, four threads keep the link busy; bytes from RAM need more threads and buffers
(27 GB/s with 4 threads, 36-43 with 8); bytes from files are bound by the drive, so a small ring suffices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.memory.requests import MemoryRequest, RamMode

__all__ = ["StagerSizing", "count_threads", "size_stager"]

RING_SLOTS = 384
RING_SLOTS_FUSED = 1024
RING_SLOTS_FILES = 96
FEW_UNPINNED = 0.10


@dataclass(frozen=True)
class StagerSizing:
    """``source`` says where the bytes that are not page-locked come from; ``reason`` is for the log."""

    num_threads: int
    num_buffers: int
    ring_slots: int
    source: Literal["RAM", "files"]
    unpinned_share: float
    reason: str


def count_threads(num_cpus: int) -> int:
    """Threads that stage from RAM on a machine that was not measured."""
    return max(4, min(8, num_cpus // 4))


def size_stager(request: MemoryRequest, mode: RamMode, *, unpinned_share: float) -> StagerSizing:
    """Sizes for a share (0..1) of expert bytes outside VRAM that no page-locked range holds."""
    source: Literal["RAM", "files"] = "RAM" if mode in ("arena", "resident") else "files"
    ring = RING_SLOTS_FUSED if request.fused_kernels else RING_SLOTS
    threads, buffers, reason = 4, 16, "few bytes to stage"
    wide = unpinned_share > FEW_UNPINNED
    if request.stage_resident is not None:
        wide, reason = request.stage_resident, "STRATA_STAGE_RESIDENT"
    if wide and source == "files":
        ring, reason = RING_SLOTS_FILES, "bytes come from files"
    elif wide:
        threads, buffers, reason = count_threads(request.num_cpus), 64, "bytes come from RAM"
        if request.measured_threads is not None and request.measured_threads > threads:
            threads, reason = request.measured_threads, "bytes come from RAM, threads as measured"
    if wide and request.stage_resident is not None:
        reason += ", STRATA_STAGE_RESIDENT"
    overrides = [
        name
        for name, value in (
            ("STRATA_STAGER_THREADS", request.stager_threads),
            ("STRATA_STAGER_RING", request.stager_buffers),
            ("STRATA_PREFILL_RING", request.ring_slots),
        )
        if value is not None
    ]
    return StagerSizing(
        num_threads=threads if request.stager_threads is None else request.stager_threads,
        num_buffers=buffers if request.stager_buffers is None else request.stager_buffers,
        ring_slots=ring if request.ring_slots is None else request.ring_slots,
        source=source,
        unpinned_share=unpinned_share,
        reason=", ".join(overrides) or reason,
    )
