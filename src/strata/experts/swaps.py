"""Exchanges experts between VRAM and RAM in two published steps, so that each has a valid place at every instant.

Lives in ``experts`` because it keeps the complement exact. Step 1: the promoted expert is copied into a spare slot;
once complete, the next version of the table points there, and both it and the victim are in VRAM. Step 2, once the last
round of the version before has ended: the victim's bytes are copied into the RAM place that the promoted one left;
once complete, the version after points there, and the victim's slot is the new spare. A victim that has a copy
already, or that the file serves, skips the copy. It must not choose who is swapped (``policy``).
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import CheckpointError
from strata.experts.injection import Witness
from strata.experts.mover import Move, Mover
from strata.experts.policy import Swap
from strata.experts.store import ExpertStore
from strata.experts.tiers import Tier

__all__ = ["SwapEngine"]


@dataclass(eq=False)
class _Running:
    """A swap under way. ``old_version`` is the last table version in which the promoted expert was read from RAM."""

    swap: Swap
    spare: int
    loading: Move | None
    old_version: int = -1
    place: int = -1
    saving: Move | None = None


class SwapEngine:
    """Owns the spare slots. ``start`` between rounds, ``advance`` between rounds; one thread."""

    def __init__(self, store: ExpertStore, mover: Mover, spares: list[int], injection: Witness | None = None) -> None:
        self._store, self._mover, self._injection = store, mover, injection
        self._running: list[_Running] = []
        self.spares = spares
        self.num_done = 0
        self.num_copied_back = 0
        self.num_from = [0] * len(Tier)  # swaps begun by the tier of the promoted expert

    @property
    def num_running(self) -> int:
        return len(self._running)

    def busy(self) -> set[int]:
        """Experts that a running swap moves; no second swap may name them."""
        return {expert for running in self._running for expert in running.swap}

    def start(self, swap: Swap) -> bool:
        """Begins a swap; False when no spare slot is free. Neither expert may be busy."""
        slots = self._store.slots
        assert slots.slot_of[swap.promoted] < 0, "the promoted expert is outside VRAM"
        assert slots.slot_of[swap.victim] >= 0, "the victim is in VRAM"
        assert not self.busy() & set(swap), "an expert takes part in one swap at a time"
        if not self.spares:
            return False
        spare = self.spares.pop()
        slots.invalidate(spare)
        expert = swap.promoted
        tier = Tier(int(self._store.host_tier[swap.promoted]))
        self.num_from[tier] += 1
        injection, total = self._injection, len(slots.slot_of)
        loaded = expert if injection is None else injection.before_swap(expert, tier, total)
        loading = None
        if loaded is not None:
            (loading,) = self._mover.load([loaded], [slots.slot_address(spare)])
        self._running.append(_Running(swap, spare, loading))
        return True

    def advance(self, oldest_version_in_use: int, *, block: bool = False) -> None:
        """Makes what progress is possible; rounds of versions from ``oldest_version_in_use`` on may still run."""
        for running in list(self._running):
            try:
                over = self._step(running, oldest_version_in_use, block)
            except CheckpointError:  # the file did not give the promoted expert: everybody stays where they are
                self._running.remove(running)
                self.spares.append(running.spare)
                raise
            if over:
                self._running.remove(running)
                self.num_done += 1

    def finish(self) -> None:
        """Completes every running swap. No round may be running."""
        while self._running:
            self.advance(self._store.version, block=True)

    def _step(self, running: _Running, oldest: int, block: bool) -> bool:
        """True when the swap is over."""
        if running.old_version < 0:
            if running.loading is not None and not self._complete(running.loading, block):
                return False
            self._publish_promotion(running)
        if running.old_version >= oldest:  # a round that reads the promoted expert from RAM may still run
            return False
        if running.saving is None and not self._begin_demotion(running):
            return True
        assert running.saving is not None
        if not self._complete(running.saving, block):
            return False
        self._publish_demotion(running)
        return True

    def _publish_promotion(self, running: _Running) -> None:
        self._store.slots.admit(running.swap.promoted, running.spare)
        running.old_version = self._store.version
        self._store.version += 1

    def _begin_demotion(self, running: _Running) -> bool:
        """Starts the victim's copy into RAM; False when it needs none and the swap is over."""
        store, (promoted, victim) = self._store, running.swap
        if store.place_of[victim] >= 0 or store.place_of[promoted] < 0:
            self._free_slot(victim)
            store.version += 1
            return False
        running.place = store.take_place(promoted)
        slot = int(store.slots.slot_of[victim])
        running.saving = self._mover.save(victim, store.slots.slot_address(slot), running.place)
        return True

    def _publish_demotion(self, running: _Running) -> None:
        self._store.give_place(running.swap.victim, running.place)
        self._free_slot(running.swap.victim)
        self._store.version += 1
        self.num_copied_back += 1

    def _free_slot(self, victim: int) -> None:
        slot = int(self._store.slots.slot_of[victim])
        self._store.slots.evict(slot)
        self.spares.append(slot)

    def _complete(self, move: Move, block: bool) -> bool:
        if not block and not self._mover.has_ended(move):
            return False
        self._mover.wait(move)
        return True
