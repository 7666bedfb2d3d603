"""Where every expert lies: its slot, its place in RAM, its address in the mapped file; one table, one owner a place.

Lives in ``experts`` because it is the residency itself. Experts are flat numbers (layer * experts + expert); the hot
path reads whole arrays at once. It must not copy bytes (``mover``) or choose (``policy``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.experts.slots import NOBODY, SlotCache
from strata.experts.tiers import Location, Tier
from strata.kernels.cpu.picks import Placements
from strata.memory.locked_memory import LockedMemory
from strata.memory.system import system

__all__ = ["ExpertStore", "Found"]


class Found(NamedTuple):
    """Where a list of experts is read from now. ``address`` is 0 in ``Tier.FILE``."""

    tier: NDArray[np.uint8]
    address: NDArray[np.uint64]
    num_stale: int


class ExpertStore:
    """Residency of ``num_layers`` x ``num_experts`` experts. ``version`` rises with every published change.

    ``memory`` holds the RAM places, or is None where RAM keeps no copies; ``mapped`` [experts] addresses of the mapped
    file, or None. Both outlive the store.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        slots: SlotCache,
        memory: LockedMemory | None,
        mapped: NDArray[np.uint64] | None,
    ) -> None:
        total = num_layers * num_experts
        self.num_layers, self.num_experts = num_layers, num_experts
        self.slots = slots
        self.memory = memory
        self.version = 0
        self.base_tier = Tier.FILE if mapped is None else Tier.MAPPED
        self._mapped = np.zeros(total, np.uint64) if mapped is None else mapped.ravel()
        self.place_of: NDArray[np.int32] = np.full(total, -1, np.int32)
        self.place_owner: NDArray[np.int64] = np.full(0 if memory is None else memory.num_places, NOBODY, np.int64)
        self.host_tier: NDArray[np.uint8] = np.full(total, self.base_tier, np.uint8)
        self.host_address: NDArray[np.uint64] = self._mapped.copy()
        self.alias: NDArray[np.uint64] = np.zeros(total, np.uint64)

    def flat(self, layer: int, expert: int) -> int:
        return layer * self.num_experts + expert

    def place_address(self, place: int) -> int:
        assert self.memory is not None
        return self.memory.address + place * self.memory.stride

    def is_pinned(self, place: int) -> bool:
        assert self.memory is not None
        return bool(self.memory.aliases[place])

    def give_place(self, expert: int, place: int) -> None:
        """The place's bytes are this expert's from now on; they must be complete."""
        assert self.memory is not None
        assert self.place_owner[place] == NOBODY, "a place has one owner"
        assert self.place_of[expert] == -1, "an expert has one place"
        self.place_owner[place] = expert
        self.place_of[expert] = place
        self.alias[expert] = self.memory.aliases[place]
        self.host_address[expert] = self.place_address(place)
        self.host_tier[expert] = Tier.PINNED if self.is_pinned(place) else Tier.PAGEABLE

    def take_place(self, expert: int) -> int:
        """The expert's RAM copy is nobody's from now on; returns the place, which the caller owns until it gives it."""
        place = int(self.place_of[expert])
        assert place >= 0, "the expert has no place to take"
        self.place_owner[place] = NOBODY
        self.place_of[expert] = -1
        self.alias[expert] = 0
        self.host_address[expert] = self._mapped[expert]
        self.host_tier[expert] = self.base_tier
        return place

    def find(self, experts: NDArray[np.int64]) -> Found:
        """The fastest valid place of each expert (flat numbers)."""
        hit, slot, stale = self.slots.find(experts)
        in_slot = np.uint64(self.slots.address) + slot.astype(np.uint64) * np.uint64(self.slots.stride)
        tier = np.where(hit, np.uint8(Tier.VRAM), self.host_tier[experts])
        return Found(tier, np.where(hit, in_slot, self.host_address[experts]), stale)

    def placements(self, scales: NDArray[np.float32]) -> Placements:
        """The tables for native look-ups; they are changed in place and never replaced."""
        slots = self.slots
        return Placements(
            slot_of=slots.slot_of,
            stamp_of=slots.stamp_of,
            generation=slots.generation,
            owner=slots.owner,
            fallback_kind=self.host_tier,
            fallback=self.host_address,
            scales=scales,
            slots_address=slots.address,
            stride=slots.stride,
        )

    def read_ahead(self, addresses: NDArray[np.uint64]) -> None:
        """Asks the system to bring these mapped blobs into RAM, all at once, before they are touched one by one."""
        for address in addresses.tolist():
            system.advise(address, self.slots.stride, "will_need")

    def locate(self, layer: int, expert: int) -> Location:
        """One expert's place, for people and tests."""
        number = self.flat(layer, expert)
        found = self.find(np.array([number], np.int64))
        tier = Tier(int(found.tier[0]))
        return Location(
            tier=tier,
            address=int(found.address[0]),
            alias=int(self.alias[number]),
            slot=int(self.slots.slot_of[number]) if tier is Tier.VRAM else -1,
            place=int(self.place_of[number]),
        )

    def in_vram(self) -> NDArray[np.bool_]:
        """[layers, experts] of experts that own a slot."""
        return (self.slots.slot_of >= 0).reshape(self.num_layers, self.num_experts)

    def check(self) -> None:
        """Asserts what must hold at every instant: one owner a slot and a place, and both sides agree."""
        for owner, where in ((self.slots.owner, self.slots.slot_of), (self.place_owner, self.place_of)):
            owned = np.flatnonzero(owner != NOBODY)
            assert (where[owner[owned]] == owned).all(), "an owner does not know what it owns"
            assert np.count_nonzero(where >= 0) == len(owned), "an expert claims what another owns"
        homeless = (self.slots.slot_of < 0) & (self.host_address == 0)
        assert self.base_tier is Tier.FILE or not homeless.any(), "an expert has no place at all"
