"""Faults that ``strata verify --self-test`` and the tests put into a running expert system, on purpose.

Lives in ``experts`` because the faults are about tiers, swaps and staging buffers. An object is handed to
``ExpertSystem.open``; without one nothing of this runs. It must not be reachable from a user's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from strata.experts.tiers import Tier
from strata.kernels.host import flip_bits
from strata.memory.system import system

if TYPE_CHECKING:
    from strata.experts.store import ExpertStore
    from strata.kernels.backend import DeviceStream

__all__ = ["FaultInjection"]

FLIPPED_BIT = 0x40


@dataclass
class FaultInjection:
    """What goes wrong, once each. ``happened`` lists what did; a fault that never happened proves nothing."""

    flip_bit_in: Tier | None = None  # of the first expert that is computed from this tier
    flip_at: int = 0  # the byte of the blob: one whose change no rounding of an activation can hide
    drop_swap_copy: bool = False  # the first promoted expert's bytes never reach the spare slot
    reuse_buffer_early: bool = False  # a staging buffer is taken again before its last copy is complete
    happened: list[str] = field(default_factory=list)

    def before_compute(self, tier: Tier, address: int) -> None:
        """Called with an expert that is about to be computed from ``address``."""
        if self.flip_bit_in is tier:
            self.flip_bit_in = None
            self._flip(tier, address)
            self.happened.append(f"one bit of an expert in {tier.name} was flipped")

    def plant(self, store: ExpertStore, stream: DeviceStream) -> bool:
        """In place of ``before_compute`` where a card computes, once before the first round: only the card knows what
        it picks, so the bit is flipped in every expert of the tier. Whether anything was flipped.

        What lies in the file alone is no place for it: a round reads that anew and compares it.
        """
        tier = self.flip_bit_in
        if tier is None:
            return False
        assert tier is not Tier.FILE, "bytes of the file are read in the round"
        self.flip_bit_in = None
        in_slots = tier is Tier.VRAM
        addresses = store.slots.valid()[1] if in_slots else store.host_address[store.host_tier == tier]
        for address in addresses.tolist():
            if in_slots:
                _flip_on_device(stream, address + self.flip_at)
            else:
                self._flip(tier, address)
        self.happened.append(f"one bit of every expert in {tier.name} was flipped")
        return True

    def _flip(self, tier: Tier, address: int) -> None:
        if tier is Tier.MAPPED:
            system.make_writable(address + self.flip_at, 1)
        flip_bits(address + self.flip_at, FLIPPED_BIT)

    def drops_this_swap(self) -> bool:
        if self.drop_swap_copy:
            self.drop_swap_copy = False
            self.happened.append("the copy of a swap was dropped")
            return True
        return False

    def reuses_this_buffer(self) -> bool:
        """Called when every staging buffer still waits for its copy."""
        if self.reuse_buffer_early:
            self.reuse_buffer_early = False
            self.happened.append("a staging buffer was reused before its copy was complete")
            return True
        return False


def _flip_on_device(stream: DeviceStream, address: int) -> None:
    byte = np.zeros(1, np.uint8)
    stream.copy(byte.ctypes.data, address, 1)
    stream.synchronize()
    byte ^= FLIPPED_BIT
    stream.copy(address, byte.ctypes.data, 1)
    stream.synchronize()
