"""Random operations with faults, every state checked by checksums against an independent model of who is where.

The model is two sets, the experts in VRAM and those in RAM, changed by the rules of each mode alone. The bytes at every
address that the store hands out must have the checksum of the expert they are said to be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from strata.experts.policy import Swap
from strata.experts.tiers import Tier
from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.host import HostFaults
from tests.experts.small_model import Opened, SmallPack, open_system, oracle

OPERATIONS = 215
MODES: dict[str, dict[str, object]] = {
    "arena": {},
    "resident": {"mode": "resident"},
    "budget": {"mode": "budget", "budget_bytes": 7 * 12288},
    "mapped": {"mode": "mapped"},
}
REFUSED = HostFaults(refuse_one_allocation=True, refuse_at_slice=1)
FAULTS = {
    "none": HostFaults(),
    "late": replace(REFUSED, copies="last_moment", late_queries=2),
    "threaded": HostFaults(copies="threaded", copy_delay_s=0.0001, refuse_after_bytes=8 * 12288),
    "pageable": replace(REFUSED, copies="last_moment", refuse_at_slice=0, poison_after_refusal=True),
}


@dataclass
class Model:
    """Who is where, by the rules alone."""

    vram: set[int]
    ram: set[int]
    running: list[Swap] = field(default_factory=list)

    def settle(self) -> None:
        for promoted, victim in self.running:
            self.vram.add(promoted)
            self.vram.remove(victim)
            if victim not in self.ram and promoted in self.ram:
                self.ram.remove(promoted)
                self.ram.add(victim)
        self.running.clear()


class Driver:
    """One system under random operations."""

    def __init__(self, opened: Opened, kernel: ExpertKernel, seed: int) -> None:
        self.opened, self.kernel = opened, kernel
        self.store, self.swaps = opened.system.store, opened.system.swaps
        self.random = random.Random(seed)
        self.model = Model(self.in_vram(), self.in_ram())
        self.expected = opened.pack.checksums.ravel()
        self.counts: dict[str, int] = {}
        self.published = (-1, b"")

    def in_vram(self) -> set[int]:
        return set(np.flatnonzero(self.store.slots.slot_of >= 0).tolist())

    def in_ram(self) -> set[int]:
        return set(np.flatnonzero(self.store.place_of >= 0).tolist())

    def step(self) -> None:
        often = [self.window, self.start_swap, self.end_round]
        operation = self.random.choice(
            [*often, *often, self.overlap, self.prompt, self.end_prompt, self.finish, self.forge_stale]
        )
        self.counts[operation.__name__] = self.counts.get(operation.__name__, 0) + 1
        operation()
        self.check_bytes()

    def window(self) -> None:
        self.compare(self.random.choice([1, 1, 2, 4, 64]))

    def prompt(self) -> None:
        self.compare(self.random.choice([65, 90, 520]))
        self.model.settle()  # a prompt completes the swaps before it borrows

    def compare(self, num_rows: int) -> None:
        seed = self.random.randrange(50)
        actual = self.opened.forward(seed, num_rows)
        torch.testing.assert_close(actual, expected_rows(self.opened.pack, self.kernel, seed, num_rows), rtol=0, atol=0)

    def start_swap(self) -> None:
        layer = self.random.randrange(self.store.num_layers)
        experts = set(range(layer * self.store.num_experts, (layer + 1) * self.store.num_experts))
        inside = sorted(experts & self.in_vram() - self.swaps.busy())
        outside = sorted(experts - self.in_vram() - self.swaps.busy())
        if inside and outside and self.opened.system._ring is None:
            swap = Swap(self.random.choice(outside), self.random.choice(inside))
            if self.swaps.start(swap):
                self.model.running.append(swap)

    def end_round(self) -> None:
        self.opened.system.end_round()

    def overlap(self) -> None:
        """Two rounds in flight: the older one keeps its version of the table usable until it ends."""
        system = self.opened.system
        first = system.begin_round()
        found = self.store.find(np.arange(len(self.expected)))
        second = system.begin_round()
        system.end_round(second)
        for number in np.flatnonzero(found.tier != Tier.FILE).tolist():  # still the right bytes for the older round
            assert checksum_at(int(found.address[number]), self.opened.pack.blob_bytes) == self.expected[number]
        system.end_round(first)

    def end_prompt(self) -> None:
        self.opened.system.end_prompt()

    def finish(self) -> None:
        self.swaps.finish()
        self.model.settle()
        if self.opened.system._ring is None:
            assert self.in_vram() == self.model.vram
        assert self.in_ram() == self.model.ram

    def forge_stale(self) -> None:
        """Residency metadata that outlives its slot: it is a miss, never other bytes (fault 15)."""
        slots = self.store.slots
        claimed = sorted(self.in_vram())
        if not claimed or self.opened.system._ring is not None:
            return
        self.swaps.finish()
        self.model.settle()
        claimed = sorted(self.in_vram())
        liar = self.random.choice([expert for expert in range(len(self.expected)) if expert not in claimed])
        slot = int(slots.slot_of[self.random.choice(claimed)])
        slots.slot_of[liar], slots.stamp_of[liar] = slot, slots.generation[slot] - 1
        found = self.store.find(np.array([liar]))
        assert found.num_stale == 1
        assert found.tier[0] != Tier.VRAM
        slots.slot_of[liar] = slots.stamp_of[liar] = -1

    def check_bytes(self) -> None:
        self.store.check()
        found = self.store.find(np.arange(len(self.expected)))
        nbytes = self.opened.pack.blob_bytes
        # A card's table is made anew when the version has risen, and at no other time. No alias of an expert that has a
        # slot is looked at: a swap may be filling that place in RAM with another's bytes.
        alias = np.where(found.tier == Tier.VRAM, np.uint64(0), self.store.alias)
        published = (self.store.version, found.address.tobytes() + alias.tobytes())
        assert published[0] != self.published[0] or published[1] == self.published[1], "changed, and nobody was told"
        self.published = published
        for number, (tier, address) in enumerate(zip(found.tier.tolist(), found.address.tolist(), strict=True)):
            assert (tier == Tier.FILE) == (address == 0)
            if address:
                assert checksum_at(address, nbytes) == self.expected[number], f"expert {number} in {Tier(tier).name}"
            if self.store.alias[number]:
                assert checksum_at(int(self.store.alias[number]), nbytes) == self.expected[number]
        everywhere = self.in_vram() | self.in_ram()
        if self.opened.system.plan.mode in ("arena", "resident") and self.opened.system._ring is None:
            assert len(everywhere) == len(self.expected), "the complement is exact"


ROWS: dict[tuple[int, int], torch.Tensor] = {}


def expected_rows(pack: SmallPack, kernel: ExpertKernel, seed: int, num_rows: int) -> torch.Tensor:
    if (seed, num_rows) not in ROWS:
        ROWS[seed, num_rows] = oracle(pack, kernel, seed, num_rows)
    return ROWS[seed, num_rows]


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_random_operations(small: tuple[SmallPack, ExpertKernel], mode: str, faults: str) -> None:
    pack, kernel = small
    never = 10**9  # the driver alone starts swaps
    for seed, extra in enumerate([{}, {"stager_buffers": 2, "ring_slots": 3}, {"expert_cache": 9}]):
        changes: dict[str, object] = {"adapt_every": never, "adapt_swaps": 3, **MODES[mode], **extra}
        opened = open_system(pack, kernel, FAULTS[faults], **changes)
        try:
            driver = Driver(opened, kernel, seed)
            for _ in range(OPERATIONS):
                driver.step()
            opened.system.end_prompt()
            driver.finish()
            statistics = opened.system.statistics()
            assert opened.backend.statistics().pageable_copies == 0  # the device never copies ordinary memory itself
            assert statistics.swaps > 10
            assert statistics.ring_loads > 10
            assert statistics.slots_refilled > 10
            assert len(driver.counts) == 8
        finally:
            opened.close()
