"""The tiers as a GPU's decode rounds see them: tables of addresses on the device, and the conductor for the CPU's part.

Lives in ``experts`` because it is where residency meets a round on a card; ``dispatch.py`` is the same for the CPU.
An expert with a valid slot is the GPU's; one whose copy is page-locked may be read by the GPU over the link, as the
share says; all others are the CPU's. Tables change between rounds alone, when the store's version has risen. It must
not know a model, and decides nothing about who is where.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from strata.experts.dispatch import DispatchCounters
from strata.experts.source import ExpertSource
from strata.experts.store import ExpertStore
from strata.experts.tiers import Tier
from strata.kernels.cpu.conductor import Conductor, FileTables, RamTables
from strata.kernels.cuda.expert_step import ExpertTables
from strata.kernels.cuda.mailbox import Box
from strata.quant.layout import ExpertLayout

__all__ = ["DeviceDispatch"]


class DeviceDispatch:
    """Owns the conductor and the device's tables until ``close``. One thread calls everything else."""

    def __init__(
        self,
        store: ExpertStore,
        source: ExpertSource,
        layout: ExpertLayout,
        device: torch.device,
        mail: Mapping[str, int],
        most_rows: int,
        most_picks: int,
        *,
        buffers: tuple[int, int] = (0, 0),
        pcie_fraction: float = 0.0,
        pcie_balance: bool = True,
    ) -> None:
        """``mail``: host addresses of the mailbox's parts. ``buffers``: address and number of staging buffers for
        experts that are in the file alone."""
        self._store = store
        self._version = -1
        self._alias: NDArray[np.int64] | None = None  # as the device has it
        self.tables = ExpertTables.on(device, torch.from_numpy(source.scales), pcie_fraction, balance=pcie_balance)
        nowhere = (store.slots.slot_of < 0) & (store.host_address == 0)  # swaps keep these where they are
        in_file = store.base_tier is Tier.FILE and bool(nowhere.any())
        checksums = source.checksums() if store.base_tier is Tier.MAPPED or in_file else None
        # Bytes in RAM were compared when they were read; a mapped file's are compared at their first use.
        self._checked = np.ones(len(store.host_tier), np.uint8)
        if checksums is not None and store.base_tier is Tier.MAPPED:
            self._checked[store.host_tier == Tier.MAPPED] = 0
        checked = None if checksums is None else self._checked
        ram = RamTables(store.host_address, store.host_tier, source.scales, checked, checksums)
        file = None
        if in_file and buffers[1]:
            file = FileTables(*source.file_tables(), *buffers, store.slots.stride)
        self.reads_files = file is not None
        self._conductor = Conductor(layout, mail, most_rows, most_picks, ram, file)
        self._box = Box.from_address(mail["box"])
        self._last: DispatchCounters | None = None  # of a closed one

    @property
    def conductor(self) -> Conductor:
        return self._conductor

    def refresh(self) -> bool:
        """Brings the device's tables up to date, between rounds, if the store has changed; whether it had."""
        store = self._store
        if store.version == self._version:
            return False
        self._version = store.version
        experts, addresses = store.slots.valid()  # a few thousand: rounds wait for this
        where = np.zeros(self.tables.where.shape, np.int64)
        where.reshape(-1)[experts] = addresses.view(np.int64)
        self.tables.where.copy_(torch.from_numpy(where))
        alias = store.alias.view(np.int64).reshape(where.shape)
        if self._alias is None or not np.array_equal(self._alias, alias):
            self._alias = alias.copy()
            self.tables.alias.copy_(torch.from_numpy(self._alias))
        return True

    def trust_mapped(self) -> None:
        """Takes the mapped file's bytes as compared: what is damaged on purpose after that must be seen in results."""
        self._checked[:] = 1

    def take_picks(self) -> NDArray[np.int64]:
        """[layers, experts] rows that picked each expert since the last take."""
        counts: NDArray[np.int64] = self.tables.counts.cpu().numpy().astype(np.int64)
        self.tables.counts.zero_()
        return counts

    @property
    def counters(self) -> DispatchCounters:
        """Experts computed since the start, by the tier that they were read from; ``num_calls``: layers of rounds in
        which the CPU had a part."""
        if self._last is not None:
            return self._last
        found = self._conductor.counters()
        by_tier = [int(n) for n in found.by_kind[: len(Tier)]]
        by_tier[Tier.VRAM] += int(self._box.hits)
        by_tier[Tier.PINNED] += int(self._box.aliases)
        return DispatchCounters(
            by_tier, found.exchanges, num_alias=int(self._box.aliases), num_handed_over=found.settled
        )

    def close(self) -> None:
        """May be called twice. Counters stay as they were: conductor and mailbox are gone."""
        self._last = self.counters
        self._conductor.close()
        vars(self).pop("tables", None)  # whoever still holds this holds nothing on the device
