"""Lends slots of the expert cache to a prompt's ring and fills them again afterwards.

Lives in ``experts`` because it knows which experts can spare their slot: first slots that own nothing, then those
whose expert has a copy in RAM, from the end of the cache (the coldest at the fill), then the others, which come back
from the file. It must not know what the ring does with a slot.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strata.experts.mover import Mover
from strata.experts.slots import NOBODY
from strata.experts.store import ExpertStore
from strata.memory.planner import lent_slots

__all__ = ["SlotLender"]


class SlotLender:
    """Owns no memory. While slots are lent, their experts are found in RAM or the file, never in a lent slot."""

    def __init__(self, store: ExpertStore, mover: Mover) -> None:
        self._store, self._mover = store, mover
        self._lent: list[tuple[int, int]] = []  # (slot, its expert or NOBODY)
        self._has_lent_memory = False
        self.num_lent = 0
        self.num_refilled = 0

    @property
    def lent(self) -> int:
        return len(self._lent)

    def lend(self, count: int, keep: set[int], nbytes: int = 0) -> list[int]:
        """Takes ``count`` slots (fewer if there are not as many) from the cache, none of ``keep``; their addresses.

        Before them the slots in which the last ``nbytes`` of device memory lie, ``keep`` or not, and lends that memory.
        """
        assert not self._lent, "slots are lent once at a time"
        slots = self._store.slots
        if nbytes:
            assert slots.buffer is not None, "slots whose memory can be lent"
            first = max(0, slots.num_slots - lent_slots(nbytes, slots.stride))
            self._take(range(first, slots.num_slots))
            keep = keep | set(range(first, slots.num_slots))
            lent = slots.buffer.lend(nbytes)
            assert lent <= (slots.num_slots - first) * slots.stride, "lent memory lies in lent slots"
            self._has_lent_memory = True
        tail = len(self._lent)
        owner = slots.owner
        has_copy = (owner != NOBODY) & (self._store.place_of[owner] >= 0)
        cost = np.where(owner == NOBODY, 0, np.where(has_copy, 1, 2))
        order = [int(slot) for slot in np.lexsort((-np.arange(len(owner)), cost)) if int(slot) not in keep]
        self._take(sorted(order[:count]))
        self._store.version += 1
        self.num_lent += len(self._lent)
        return [slots.slot_address(slot) for slot, _ in self._lent[tail:]]

    def _take(self, chosen: Iterable[int]) -> None:
        slots = self._store.slots
        for slot in chosen:
            expert = int(slots.owner[slot])
            if expert != NOBODY:
                slots.evict(slot)
            else:
                slots.invalidate(slot)
            self._lent.append((slot, expert))

    def refill(self) -> None:
        """Copies the experts back into the slots they had and ends the loan. Nothing uses the slots any more.

        Raises ``DeviceMemoryFull`` where lent memory cannot be taken back yet: everything stays lent."""
        if self._has_lent_memory:
            assert self._store.slots.buffer is not None
            self._store.slots.buffer.take_back()
            self._has_lent_memory = False
        owned = [(slot, expert) for slot, expert in self._lent if expert != NOBODY]
        slots = self._store.slots
        moves = self._mover.load([expert for _, expert in owned], [slots.slot_address(slot) for slot, _ in owned])
        for (slot, expert), move in zip(owned, moves, strict=True):
            self._mover.wait(move)
            slots.admit(expert, slot)
        self._store.version += 1
        self.num_refilled += len(owned)
        self._lent.clear()
