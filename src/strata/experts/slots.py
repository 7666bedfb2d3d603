"""The device's expert cache: numbered slots, each with an owner and a generation.

Lives in ``experts`` because a slot holds an expert. A slot's generation rises whenever its bytes stop being what they
were, so that whoever remembers (slot, generation) can tell a stale memory from a valid one. It must not decide who
deserves a slot (``policy``) or copy anything (``mover``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.kernels.backend import LendableBuffer

__all__ = ["NOBODY", "SlotCache"]

NOBODY = -1


class SlotCache:
    """``num_slots`` slots of ``stride`` bytes from ``address`` on. An expert is its flat number layer * E + expert.

    ``slot_of`` and ``stamp_of`` remember for each expert its slot (or -1) and that slot's generation at admission.
    """

    def __init__(
        self, address: int, num_slots: int, stride: int, num_experts: int, buffer: LendableBuffer | None = None
    ) -> None:
        """``buffer``: what the slots lie in where its end may be lent as plain memory."""
        self.buffer = buffer
        self.address = address
        self.num_slots = num_slots
        self.stride = stride
        self.owner: NDArray[np.int64] = np.full(num_slots, NOBODY, np.int64)
        self.generation: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.slot_of: NDArray[np.int32] = np.full(num_experts, -1, np.int32)
        self.stamp_of: NDArray[np.int64] = np.full(num_experts, -1, np.int64)

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.stride

    def admit(self, expert: int, slot: int) -> None:
        """The slot's bytes are this expert's from now on; they must be complete."""
        assert self.owner[slot] == NOBODY, "a slot has one owner"
        assert self.slot_of[expert] == -1, "an expert has one slot"
        self.generation[slot] += 1
        self.owner[slot] = expert
        self.slot_of[expert] = slot
        self.stamp_of[expert] = self.generation[slot]

    def evict(self, slot: int) -> int:
        """The slot's bytes are nobody's from now on; returns whose they were."""
        expert = int(self.owner[slot])
        assert expert != NOBODY, "only an owned slot is evicted"
        self.generation[slot] += 1
        self.owner[slot] = NOBODY
        self.slot_of[expert] = -1
        self.stamp_of[expert] = -1
        return expert

    def invalidate(self, slot: int) -> None:
        """The slot's bytes are about to be overwritten by something that owns no slot (a prompt's ring)."""
        assert self.owner[slot] == NOBODY, "an owned slot is evicted first"
        self.generation[slot] += 1

    def valid(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """(experts, addresses of their slots) of every slot that ``find`` would call a hit."""
        slots = np.flatnonzero(self.owner != NOBODY)
        experts = self.owner[slots]
        good = (self.slot_of[experts] == slots) & (self.stamp_of[experts] == self.generation[slots])
        addresses = np.uint64(self.address) + slots[good].astype(np.uint64) * np.uint64(self.stride)
        return experts[good], addresses

    def find(self, experts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int32], int]:
        """(hit, slot, stale memories) of each expert: a hit only where slot and generation both still match."""
        slots = self.slot_of[experts]
        claimed = slots >= 0
        if not self.num_slots:
            return claimed, slots, 0
        hit = claimed & (self.generation[slots] == self.stamp_of[experts]) & (self.owner[slots] == experts)
        return hit, slots, int(np.count_nonzero(claimed)) - int(np.count_nonzero(hit))
