"""What ``strata verify`` and the tests put into a running expert system on purpose: a witness, or a witness that does
harm.

Lives in ``experts`` because both are about tiers, swaps and staging buffers. An object is handed to
``ExpertSystem.open``; without one nothing of this runs. It must not be reachable from a user's configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from strata.experts.tiers import Tier
from strata.kernels.cpu.picks import GroupedPicks
from strata.kernels.host import flip_bits
from strata.memory.system import system

if TYPE_CHECKING:
    from strata.experts.store import ExpertStore
    from strata.kernels.backend import DeviceStream

__all__ = ["FaultInjection", "Witness"]

FLIPPED_BIT = 0x40


class Witness:
    """Counts what an expert system did, by tier. Every hook of it hands back what it was given."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[tuple[Tier, ...], int]] = Counter()
        """Layers' calls by the tiers that met in them and their rows; of rounds on a card none are seen."""
        self.swaps: Counter[Tier] = Counter()
        """Swaps by the tier that the promoted expert came from."""

    def before_call(self, picks: GroupedPicks, num_rows: int) -> None:
        """Called with a layer's tasks before anything is computed."""
        met = tuple(tier for tier in Tier if picks.by_kind[tier])
        self.calls[met, num_rows] += 1

    def before_compute(self, tier: Tier, address: int) -> None:
        """Called with an expert that is about to be computed from ``address``."""

    def before_sum(self, parts: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Called with the results of each (row, k), [T * K, H], and their weights, before they are summed in order."""
        return parts, weights_TK

    def plant(self, store: ExpertStore, stream: DeviceStream) -> bool:
        """Called once before the first round on a card. Whether anything was changed."""
        return False

    def before_swap(self, promoted: int, tier: Tier, total: int) -> int | None:
        """Called when an expert is promoted from ``tier``; which one to copy, or None for none at all."""
        self.swaps[tier] += 1
        return promoted

    def reuses_this_buffer(self) -> bool:
        """Called when every staging buffer still waits for its copy; whether one is taken all the same."""
        return False

    def before_answer(self, best: Sequence[int], vocabulary: int) -> list[int]:
        """Called with the ids that a greedy round found."""
        return list(best)


@dataclass
class FaultInjection(Witness):
    """What goes wrong. ``happened`` lists what did; a fault that never happened proves nothing."""

    flip_bit_in: Tier | None = None  # of the first expert that is computed from this tier
    flip_at: int = 0  # the byte of the blob: one whose change no rounding of an activation can hide
    drop_swap_copy: bool = False  # the first promoted expert's bytes never reach the spare slot
    swap_wrong_from: Tier | None = None  # every expert promoted from this tier is its neighbour's bytes
    reuse_buffer_early: bool = False  # a staging buffer is taken again before its last copy is complete
    reorder_sums_above: int = 0  # calls of more rows sum a row's experts in another order
    drop_row_in: tuple[int, int] | None = None  # calls of so many rows, ends included, lose the last one's results
    nudge_scales_of: tuple[Tier, ...] = ()  # where these meet in a call, the last one's scales are one ulp off
    wrong_greedy_id: bool = False  # a greedy round answers with the id after the best one
    happened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def before_call(self, picks: GroupedPicks, num_rows: int) -> None:
        super().before_call(picks, num_rows)
        tiers = self.nudge_scales_of
        if tiers and all(picks.by_kind[tier] for tier in tiers):
            scales = picks.tasks.tasks["scales"]
            here = picks.kinds == tiers[-1]
            scales[here] = np.nextafter(scales[here], np.float32(np.inf))
            self._tell(f"scales in {tiers[-1].name} were one ulp off where {' and '.join(t.name for t in tiers)} met")

    def before_compute(self, tier: Tier, address: int) -> None:
        if self.flip_bit_in is tier:
            self.flip_bit_in = None
            self._flip(tier, address)
            self._tell(f"one bit of an expert in {tier.name} was flipped")

    def before_sum(self, parts: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, picks = weights_TK.shape
        if self.reorder_sums_above and rows > self.reorder_sums_above:
            self._tell(f"experts were summed in another order in a call of {rows:,} rows")
            return parts.view(rows, picks, -1).flip(1).reshape(parts.shape), weights_TK.flip(1).contiguous()
        if self.drop_row_in is not None and self.drop_row_in[0] <= rows <= self.drop_row_in[1]:
            self._tell(f"the last row of a window of {rows} rows was dropped")
            parts[-picks:] = 0
        return parts, weights_TK

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
        self._tell(f"one bit of every expert in {tier.name} was flipped")
        return True

    def before_swap(self, promoted: int, tier: Tier, total: int) -> int | None:
        super().before_swap(promoted, tier, total)
        if self.drop_swap_copy:
            self.drop_swap_copy = False
            self._tell("the copy of a swap was dropped")
            return None
        if self.swap_wrong_from is tier:
            self._tell(f"a wrong expert was swapped in from {tier.name}")
            return promoted + 1 if promoted + 1 < total else promoted - 1
        return promoted

    def reuses_this_buffer(self) -> bool:
        if self.reuse_buffer_early:
            self.reuse_buffer_early = False
            self._tell("a staging buffer was reused before its copy was complete")
            return True
        return False

    def before_answer(self, best: Sequence[int], vocabulary: int) -> list[int]:
        if not self.wrong_greedy_id:
            return list(best)
        self._tell("a greedy round answered with another id")
        return [(one + 1) % vocabulary for one in best]

    def _tell(self, what: str) -> None:
        if what not in self.happened:
            self.happened.append(what)

    def _flip(self, tier: Tier, address: int) -> None:
        if tier is Tier.MAPPED:
            system.make_writable(address + self.flip_at, 1)
        flip_bits(address + self.flip_at, FLIPPED_BIT)


def _flip_on_device(stream: DeviceStream, address: int) -> None:
    byte = np.zeros(1, np.uint8)
    stream.copy(byte.ctypes.data, address, 1)
    stream.synchronize()
    byte ^= FLIPPED_BIT
    stream.copy(address, byte.ctypes.data, 1)
    stream.synchronize()
