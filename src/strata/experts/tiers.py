"""The names of the places an expert can be read from, fastest first, and one such place.

Lives in ``experts`` because only this room knows tiers. It must not know how bytes get from one to another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Location", "Tier"]


class Tier(IntEnum):
    """Where a pick is served from. The values index counters and the ``tier`` tables."""

    VRAM = 0  # a slot of the device cache
    PINNED = 1  # page-locked RAM: the device reads it through its alias, the CPU in place
    PAGEABLE = 2  # ordinary RAM: the CPU computes it in place, prompts stage it
    MAPPED = 3  # the file, mapped: the page cache decides whether it is in RAM
    FILE = 4  # read from the file each time


@dataclass(frozen=True)
class Location:
    """Where one expert lies now. Addresses are 0 where the tier has none; ``slot`` is -1 outside VRAM."""

    tier: Tier
    address: int
    alias: int
    slot: int
    place: int
