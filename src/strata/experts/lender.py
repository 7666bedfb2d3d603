"""Lends slots of the expert cache to a prompt's ring and fills them again afterwards.

Lives in ``experts`` because it knows which experts can spare their slot: first slots that own nothing, then those
whose expert has a copy in RAM, from the end of the cache (the coldest at the fill), then the others, which come back
from the file. It must not know what the ring does with a slot.
"""

from __future__ import annotations

import numpy as np

from strata.experts.mover import Mover
from strata.experts.slots import NOBODY
from strata.experts.store import ExpertStore

__all__ = ["SlotLender"]


class SlotLender:
    """Owns no memory. While slots are lent, their experts are found in RAM or the file, never in a lent slot."""

    def __init__(self, store: ExpertStore, mover: Mover) -> None:
        self._store, self._mover = store, mover
        self._lent: list[tuple[int, int]] = []  # (slot, its expert or NOBODY)
        self.num_lent = 0
        self.num_refilled = 0

    @property
    def lent(self) -> int:
        return len(self._lent)

    def lend(self, count: int, keep: set[int]) -> list[int]:
        """Takes ``count`` slots (fewer if there are not as many) from the cache, none of ``keep``; their addresses."""
        assert not self._lent, "slots are lent once at a time"
        slots = self._store.slots
        owner = slots.owner
        has_copy = (owner != NOBODY) & (self._store.place_of[owner] >= 0)
        cost = np.where(owner == NOBODY, 0, np.where(has_copy, 1, 2))
        order = [int(slot) for slot in np.lexsort((-np.arange(len(owner)), cost)) if int(slot) not in keep]
        for slot in sorted(order[:count]):
            expert = int(owner[slot])
            if expert != NOBODY:
                slots.evict(slot)
            else:
                slots.invalidate(slot)
            self._lent.append((slot, expert))
        self._store.version += 1
        self.num_lent += len(self._lent)
        return [slots.slot_address(slot) for slot, _ in self._lent]

    def refill(self) -> None:
        """Copies the experts back into the slots they had and ends the loan. Nothing uses the slots any more."""
        owned = [(slot, expert) for slot, expert in self._lent if expert != NOBODY]
        slots = self._store.slots
        moves = self._mover.load([expert for _, expert in owned], [slots.slot_address(slot) for slot, _ in owned])
        for (slot, expert), move in zip(owned, moves, strict=True):
            self._mover.wait(move)
            slots.admit(expert, slot)
        self._store.version += 1
        self.num_refilled += len(owned)
        self._lent.clear()
