"""What an expert system has counted: one immutable answer for metrics, ``strata verify``, tests and tables.

Lives in ``experts`` because the numbers are about tiers. It must not count anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExpertStatistics"]


@dataclass(frozen=True)
class ExpertStatistics:
    """Counts since the start. A pick is one expert in one layer of one call, whatever rows chose it."""

    num_calls: int
    hits: int  # picks served from VRAM
    misses_pinned: int
    misses_pageable: int
    misses_mapped: int
    misses_file: int
    alias_picks: int  # page-locked misses that the device reads through their alias
    handed_over: int  # layers of a card's rounds whose CPU part the host handed over, where no mailbox works
    stale_generations: int
    direct_bytes: int  # page-locked RAM to device, by its own copies
    direct_runs: int
    staged_bytes: int  # pageable or mapped RAM through staging buffers
    file_bytes: int  # read from the file after the load
    saved_bytes: int  # device to RAM, by swaps
    ring_loads: int
    ring_unused: int  # streamed ahead for nothing
    slots_lent: int
    slots_refilled: int
    swaps: int
    swaps_pinned: int  # begun, by the tier of the promoted expert
    swaps_pageable: int
    swaps_mapped: int
    swaps_file: int
    swaps_copied_back: int
    buffer_waits: int
    loaded_bytes: int  # read from the file at the load
    experts_in_vram: int
    experts_in_ram: int
    experts_pinned: int
    pinned_bytes: int
    page_lock_seconds: float  # of page-locking the RAM copy, from when somebody waited for it
    page_lock_path: int  # 1, 2 or 3 of the RAM copy; 0 where RAM holds none
    version: int

    @property
    def misses(self) -> int:
        return self.misses_pinned + self.misses_pageable + self.misses_mapped + self.misses_file

    @property
    def hit_rate(self) -> float:
        """Share of picks served from VRAM; 0 before the first pick."""
        picks = self.hits + self.misses
        return self.hits / picks if picks else 0.0
