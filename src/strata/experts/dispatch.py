"""Computes a layer's picked experts wherever they lie: the one ``ExpertExecutor`` of rounds and prompt chunks.

Lives in ``experts`` because it is where residency meets arithmetic. Each expert is computed by the same kernel on the
same bytes whatever tier they come from, and results are summed in router order, so placement never changes a token.
It must not know a model, and decides nothing about who is where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from strata.experts.injection import Witness
from strata.experts.mover import Move, Mover
from strata.experts.policy import split_pinned
from strata.experts.ring import PromptRing
from strata.experts.store import ExpertStore
from strata.experts.tiers import Tier
from strata.kernels.cpu.experts import ExpertTasks
from strata.kernels.cpu.picks import GroupedPicks, PickTables

__all__ = ["WINDOW_ROWS", "DispatchCounters", "Dispatcher", "ExpertKernel"]

WINDOW_ROWS = 64  # up to so many rows are a decode window: experts are computed where they lie
# From so many rows on nearly every expert of a layer is picked, so the next layer's are streamed before its router.
LOOK_AHEAD_ROWS = 512


class ExpertKernel(Protocol):
    """The exact arithmetic of routed experts: the same bits for the same bytes (``kernels.cpu.experts``)."""

    def compute(
        self, tasks: ExpertTasks, x_TH: torch.Tensor, out: torch.Tensor, flags: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]: ...

    def combine(
        self, parts_TKH: torch.Tensor, weights_TK: torch.Tensor, flags: NDArray[np.uint8] | None = None
    ) -> torch.Tensor: ...


@dataclass
class DispatchCounters:
    """Picked experts by the tier that served them (a pick of several rows counts once), and what happened else."""

    by_tier: list[int]
    num_calls: int = 0
    num_alias: int = 0
    num_stale: int = 0
    num_handed_over: int = 0


class Dispatcher:
    """See the module's page. One thread calls it. ``open_ring`` and ``close_ring`` belong to the system."""

    def __init__(
        self,
        store: ExpertStore,
        mover: Mover,
        kernel: ExpertKernel,
        scales: NDArray[np.float32],
        *,
        check_mapped: Callable[[int, int, int], None],
        open_ring: Callable[[int], PromptRing | None],
        close_ring: Callable[[], None],
        pcie_fraction: float = 0.0,
        pcie_balance: bool = True,
        cpu_share: float = 0.0,
        injection: Witness | None = None,
    ) -> None:
        self.counters = DispatchCounters([0] * len(Tier))
        self._store, self._mover, self._kernel = store, mover, kernel
        self._tables = PickTables(store.placements(scales))
        self._check_mapped = check_mapped
        self._open_ring, self._close_ring = open_ring, close_ring
        self._pcie_fraction, self._pcie_balance, self._cpu_share = pcie_fraction, pcie_balance, cpu_share
        self._injection = injection
        self._flags = np.zeros(0, np.uint8)

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """y_TH of one layer, as ``ExpertExecutor`` says. Raises the named error of a read or copy that failed."""
        num_rows, top_k = ids_TK.shape
        ring = self._ring_for(num_rows, top_k)
        picks = self._tables.group(layer, ids_TK.numpy())
        if picks.by_kind[Tier.MAPPED]:
            for task in np.flatnonzero(picks.kinds == Tier.MAPPED).tolist():
                self._check_mapped(layer, int(picks.tasks.experts[task]), int(picks.tasks.tasks["blob"][task]))
        self._count(picks, num_rows)
        parts = torch.empty(num_rows * top_k, x_TH.shape[1])
        work = _Work(self._kernel, layer, picks, x_TH, parts, self._start_flags(num_rows))
        if ring is not None:
            self._stream(ring, work, look_ahead=num_rows >= LOOK_AHEAD_ROWS and not self._cpu_share)
        elif picks.by_kind[Tier.FILE]:
            self._read(work)
        else:
            if picks.by_kind[Tier.MAPPED]:
                self._store.read_ahead(picks.tasks.tasks["blob"][picks.kinds == Tier.MAPPED])
            work.compute_all()
        if self._injection is not None:
            parts, weights_TK = self._injection.before_sum(parts, weights_TK)
        return self._kernel.combine(parts, weights_TK, work.flags)

    def take_flags(self) -> NDArray[np.uint8]:
        """One byte a row of the calls since the last take: 1 where a number was not finite in any layer."""
        flags, self._flags = self._flags, np.zeros(0, np.uint8)
        return flags

    def take_picks(self) -> NDArray[np.int64]:
        """[layers, experts] rows that picked each expert since the last take."""
        picks = self._tables.counts.copy()
        self._tables.counts[:] = 0
        return picks

    def _ring_for(self, num_rows: int, top_k: int) -> PromptRing | None:
        if num_rows > WINDOW_ROWS:
            return self._open_ring(num_rows * top_k)
        self._close_ring()
        return None

    def _stream(self, ring: PromptRing, work: _Work, *, look_ahead: bool) -> None:
        """A prompt: VRAM experts, and the CPU's share, are computed in place while the others arrive in the ring."""
        in_place = work.picks.kinds == Tier.VRAM
        in_place[self._choose_for_cpu(work)] = True
        task_of = self._number(work, np.flatnonzero(~in_place))
        ring.want(list(task_of))
        work.compute(np.flatnonzero(in_place))
        prefetch = (lambda: ring.want(self._list_outside(work.layer + 1))) if look_ahead else None
        for batch in ring.take(list(task_of), prefetch):
            self._compute_moved(batch, task_of, work)

    def _choose_for_cpu(self, work: _Work) -> NDArray[np.int64]:
        """The rarest of a prompt's experts that lie in RAM, as many as the CPU's share of those outside VRAM says."""
        kinds = work.picks.kinds
        count = int(np.count_nonzero(kinds != Tier.VRAM) * self._cpu_share)
        in_ram = np.flatnonzero((kinds != Tier.VRAM) & (kinds != Tier.FILE))
        rows = work.picks.tasks.tasks["count"][in_ram]
        return in_ram[np.argsort(rows, kind="stable")[:count]]

    def _read(self, work: _Work) -> None:
        """Some picks are in the file alone: they are read ahead into staging buffers while the others are computed."""
        kinds = work.picks.kinds
        task_of = self._number(work, np.flatnonzero(kinds == Tier.FILE))
        waiting = list(task_of)
        reading = self._fetch(waiting)
        batch: list[Move] = []
        try:
            work.compute(np.flatnonzero(kinds != Tier.FILE))
            while reading or waiting:
                if not reading:
                    self._mover.pump(block=True)  # swaps hold every buffer
                batch = self._collect(reading)
                self._compute_moved(batch, task_of, work)
                for move in batch:
                    self._mover.release(move)
                reading += self._fetch(waiting)
        finally:  # an error must not keep staging buffers
            for move in (*batch, *reading):
                self._mover.release(move)

    def _number(self, work: _Work, tasks: NDArray[np.int64]) -> dict[int, int]:
        """Flat expert number -> task, in the order of the tasks."""
        experts = work.picks.tasks.experts[tasks].astype(np.int64) + work.layer * self._store.num_experts
        return dict(zip(experts.tolist(), tasks.tolist(), strict=True))

    def _collect(self, reading: list[Move]) -> list[Move]:
        """Takes what has arrived from the head of ``reading``, at most half the buffers; waits for the first."""
        most = max(1, self._mover.buffers.num_buffers // 2)
        count = 0
        while count < min(most, len(reading)) and (count == 0 or self._mover.has_ended(reading[count])):
            self._mover.wait(reading[count])
            count += 1
        batch = reading[:count]
        del reading[:count]
        return batch

    def _fetch(self, waiting: list[int]) -> list[Move]:
        """Starts reading from the head of ``waiting`` into what buffers are free."""
        moves = []
        while waiting and (move := self._mover.fetch(waiting[0])) is not None:
            moves.append(move)
            del waiting[0]
        return moves

    def _compute_moved(self, batch: list[Move], task_of: dict[int, int], work: _Work) -> None:
        if not batch:
            return
        chosen = np.array([task_of[move.expert] for move in batch], np.int64)
        work.picks.tasks.tasks["blob"][chosen] = [move.address for move in batch]
        if self._injection is not None:
            for task, move in zip(chosen.tolist(), batch, strict=True):
                if work.picks.kinds[task] == Tier.FILE:
                    self._injection.before_compute(Tier.FILE, move.address)
        work.compute(chosen)

    def _list_outside(self, layer: int) -> list[int]:
        """Every expert of a layer that VRAM does not hold, in order; empty after the last layer."""
        if layer >= self._store.num_layers:
            return []
        first = layer * self._store.num_experts
        inside = self._store.slots.slot_of[first : first + self._store.num_experts] >= 0
        numbers: list[int] = (np.flatnonzero(~inside) + first).tolist()
        return numbers

    def _count(self, picks: GroupedPicks, num_rows: int) -> None:
        by_tier, counters = picks.by_kind, self.counters
        counters.by_tier = [before + now for before, now in zip(counters.by_tier, by_tier, strict=False)]
        counters.num_calls += 1
        counters.num_stale += picks.num_stale
        others = by_tier[Tier.PAGEABLE] + by_tier[Tier.MAPPED] + by_tier[Tier.FILE]
        pinned = by_tier[Tier.PINNED]
        counters.num_alias += split_pinned(pinned, others, self._pcie_fraction, balance=self._pcie_balance)
        if self._injection is not None:
            self._injection.before_call(picks, num_rows)
            for tier, address in zip(picks.kinds.tolist(), picks.tasks.tasks["blob"].tolist(), strict=True):
                if address:
                    self._injection.before_compute(Tier(tier), address)

    def _start_flags(self, num_rows: int) -> NDArray[np.uint8]:
        if len(self._flags) != num_rows:
            self._flags = np.zeros(num_rows, np.uint8)
        return self._flags


@dataclass
class _Work:
    """One layer's tasks, input rows and results. ``parts`` has a row for each (row, k)."""

    kernel: ExpertKernel
    layer: int
    picks: GroupedPicks
    x_TH: torch.Tensor
    parts: torch.Tensor
    flags: NDArray[np.uint8]

    def compute_all(self) -> None:
        self.kernel.compute(self.picks.tasks, self.x_TH, self.parts, self.flags)

    def compute(self, chosen: NDArray[np.int64]) -> None:
        """Computes the tasks of these numbers; the picks of a task are a range of the shared arrays."""
        if len(chosen):
            tasks = self.picks.tasks
            part = ExpertTasks(tasks.experts[chosen], tasks.tasks[chosen], tasks.rows, tasks.slots)
            self.kernel.compute(part, self.x_TH, self.parts, self.flags)
