"""The experts of one model as the engine sees them: opened from a plan, then computed, adapted and closed.

Lives in ``experts`` because it assembles the room's parts and owns their memory. It takes exactly what the plan says
and must not plan, know a model, or decide when a round begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from strata.experts.card_stream import CardStream, ComputeOrder
from strata.experts.device_dispatch import DeviceDispatch
from strata.experts.dispatch import Dispatcher, ExpertKernel
from strata.experts.injection import Witness
from strata.experts.lender import SlotLender
from strata.experts.loader import fill_ram, fill_slots
from strata.experts.mover import Mover, StagingBuffers
from strata.experts.policy import choose_swaps, decay_counts
from strata.experts.ring import PromptRing
from strata.experts.source import ExpertFile, ExpertSource
from strata.experts.statistics import ExpertStatistics
from strata.experts.store import ExpertStore
from strata.experts.swaps import SwapEngine
from strata.experts.taking import (
    FEWEST_BUFFERS,
    Placement,
    TakenMemory,
    size_staging,
    synchronize_quietly,
    take_buffers,
    take_experts,
    warn_of_little_memory,
)
from strata.experts.tiers import Tier
from strata.kernels.backend import Backend, DeviceMemoryFull
from strata.kernels.cpu.stager import Stager
from strata.memory.planner import ResolvedPlan, format_bytes, lent_slots
from strata.memory.system import system
from strata.quant.layout import ExpertLayout
from strata.stages import Stages
from strata.words import count_of

__all__ = ["ExpertSystem"]

logger = logging.getLogger(__name__)
# A warm load is copying and checking: as many threads as there are processors, so many at most. A read past the page
# cache zeroes the fresh pages first and only then asks the drive, which must not wait for it, so it takes them all:
# of a sequential read (cpu2) four threads gave 76 %, eight 85, sixteen 92.
MOST_LOAD_THREADS = 16
CACHED_ENOUGH = 0.5  # a load reads through the page cache when it holds at least this share of the file
Progress = Callable[[int, int], None]


class ExpertSystem:
    """Use ``open``. One thread calls ``dispatcher``, ``end_round`` and ``end_prompt``; ``statistics`` any thread.

    Between ``begin_round`` and ``end_round`` nothing is swapped; a caller that never has two rounds at once may leave
    ``begin_round`` out.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        store: ExpertStore,
        source: ExpertSource,
        stager: Stager,
        mover: Mover,
        kernel: ExpertKernel,
        owned: ExitStack,
        *,
        ring_limit: int,
        heat: NDArray[np.float64],
        pcie_fraction: float,
        pcie_balance: bool,
        injection: Witness | None,
    ) -> None:
        self.plan = plan
        self.store = store
        self.mover = mover
        self._source, self._stager = source, stager
        self._ring_limit = ring_limit
        self._owned = owned
        self._heat = heat
        first_spare = plan.num_slots
        spares = list(range(first_spare, first_spare + plan.num_spares))
        self.swaps = SwapEngine(store, mover, spares, injection)
        self._lender = SlotLender(store, mover)
        self._ring: PromptRing | CardStream | None = None
        self._ring_loads = self._ring_unused = 0
        self._rounds: dict[int, int] = {}  # round number -> the table version it reads
        self._num_rounds = 0
        self._picks = np.zeros(heat.shape, np.int64)  # since the start, and since the last adaptation
        self._fresh_picks = np.zeros(heat.shape, np.int64)
        self._loaded_bytes = 0
        self._pcie_fraction, self._pcie_balance = pcie_fraction, pcie_balance
        self._device: DeviceDispatch | None = None
        self._injection = injection
        self.dispatcher = Dispatcher(
            store,
            mover,
            kernel,
            source.scales,
            check_mapped=source.check_mapped,
            open_ring=self._open_ring,
            close_ring=self.end_prompt,
            pcie_fraction=pcie_fraction,
            pcie_balance=pcie_balance,
            cpu_share=plan.request.prefill_cpu_share,
            injection=injection,
        )

    @classmethod
    def open(
        cls,
        plan: ResolvedPlan,
        file: ExpertFile,
        kernel: ExpertKernel,
        backend: Backend,
        *,
        heat: NDArray[np.float64] | None = None,
        verify: bool = True,
        pcie_fraction: float = 0.0,
        pcie_balance: bool = True,
        injection: Witness | None = None,
        progress: Progress | None = None,
        taken: TakenMemory | None = None,
        stages: Stages | None = None,
    ) -> ExpertSystem:
        """Takes the planned memory, or takes over what was ``taken`` with this ``heat``, and fills it: the copy in RAM
        while it is page-locked. ``heat`` [layers, experts] ranks experts (a profile); None: all equal.

        ``progress`` gets (bytes done, bytes in all). Raises the named error of what could not be read; nothing stays
        taken then, nor when it is interrupted.
        """
        if heat is None:
            heat = np.zeros((file.num_layers, file.num_experts))
        stages = stages or Stages()
        taken = taken or take_experts(plan, file, backend, heat)
        with taken.owned.pop_all() as owned:
            placement, memory = taken.placement, taken.ram
            source = ExpertSource(file, verify=verify)
            owned.callback(source.close)
            mapped = source.map_addresses() if plan.mode == "mapped" else None
            store = ExpertStore(file.num_layers, file.num_experts, taken.slots, memory, mapped)
            report = _count_bytes(plan, source, placement, progress)
            source.direct = source.cached_share(placement.ram or placement.vram) < CACHED_ENOUGH
            loading = ExitStack()
            owned.callback(loading.close)
            loader = Stager(MOST_LOAD_THREADS if source.direct else min(MOST_LOAD_THREADS, plan.request.num_cpus))
            loading.callback(loader.close)
            if memory is not None:
                with stages.of("experts into RAM"):
                    fill_ram(store, source, loader, placement.ram, report)
                memory.settle()
                stages.add("page-locking", memory.began, memory.ended)
            sizing = size_staging(plan, memory, placement)
            addresses = list(taken.buffers)
            addresses += take_buffers(plan, sizing.num_buffers - len(addresses), backend, owned)
            buffers = StagingBuffers(addresses[: sizing.num_buffers], injection)
            stager = Stager(sizing.num_threads)
            owned.callback(stager.close)
            stream = backend.stream()
            owned.callback(synchronize_quietly, stream)
            mover = Mover(store, source, stager, stream, buffers)
            owned.callback(mover.drain)
            opened = cls(
                plan,
                store,
                source,
                stager,
                mover,
                kernel,
                owned.pop_all(),
                ring_limit=min(plan.ring_slots, sizing.ring_slots),
                heat=heat.astype(np.float64),
                pcie_fraction=pcie_fraction,
                pcie_balance=pcie_balance,
                injection=injection,
            )
        try:
            with stages.of("slots"), loading:
                opened._fill_slots(placement, loader, report)
        except BaseException:
            opened.close()
            raise
        warn_of_little_memory(backend)
        return opened

    def serve_device(
        self,
        layout: ExpertLayout,
        device: torch.device,
        mail: Mapping[str, int],
        most_rows: int,
        most_picks: int,
    ) -> DeviceDispatch:
        """Rounds run on a card from now on, and the dispatcher is not used; ``mail`` as ``DeviceDispatch`` says."""
        reserve = self._file_buffers() if self.plan.mode == "budget" else (0, 0)
        self._device = DeviceDispatch(
            self.store,
            self._source,
            layout,
            device,
            mail,
            most_rows,
            most_picks,
            buffers=reserve,
            pcie_fraction=self._pcie_fraction,
            pcie_balance=self._pcie_balance,
        )
        self._owned.callback(self._device.close)
        self._device.refresh()
        if self._injection is not None and self._injection.plant(self.store, self.mover.stream):
            self._device.trust_mapped()
        return self._device

    def _file_buffers(self) -> tuple[int, int]:
        """(address, number) of buffers into which rounds on a card read what is in the file alone."""
        count = FEWEST_BUFFERS
        region = system.map_region(count * self.plan.stride)
        self._owned.callback(region.free)
        return region.address, count

    def open_stream(self, compute: ComputeOrder, num_chunks: int, num_layers: int, nbytes: int) -> CardStream:
        """What streams a prompt to a card, with slots borrowed or reserved for it, until ``end_prompt``. ``nbytes``: of
        buffers, which the cache lends too where they are not reserved."""
        assert self._ring is None, "one prompt is read at a time"
        self.end_prompt()  # what could not be taken back before
        nbytes = min(nbytes, self.plan.lent_bytes)
        slots = self._take_ring(2 * self.store.num_experts, nbytes) if self._ring_limit else []
        self._ring = CardStream(self.store, self.mover, slots, compute, num_chunks, num_layers)
        return self._ring

    def learn(self, picks: NDArray[np.int64], share: float) -> None:
        """Counts a prompt's picks [layers, experts]; the cache learns from a ``share`` of them."""
        self._picks += picks
        self._fresh_picks += np.rint(picks * share).astype(np.int64)

    def begin_round(self) -> int:
        """Marks a round as running; its number, for ``end_round``."""
        self._num_rounds += 1
        self._rounds[self._num_rounds] = self.store.version
        return self._num_rounds

    def end_round(self, number: int | None = None) -> None:
        """A round is over: swaps make progress, and every ``adapt_every`` rounds new ones begin."""
        if number is None:
            self._num_rounds += 1
        else:
            self._rounds.pop(number)
        if not self.plan.num_spares:
            return
        if self.swaps.num_running:
            self.swaps.advance(min(self._rounds.values(), default=self.store.version))
        every = self.plan.request.adapt_every
        if every and self._num_rounds % every == 0 and self._ring is None:
            self._adapt()

    def end_prompt(self) -> None:
        """Gives borrowed slots back to the cache and fills them. The first decode window after a prompt does it too."""
        if self._ring is not None:
            self._ring.settle()
            self._ring_loads += self._ring.num_loads
            self._ring_unused += self._ring.num_unused
            self._ring = None
        if not self._lender.lent:
            return
        try:
            self._lender.refill()
        except DeviceMemoryFull as full:
            short = format_bytes(full.asked)
            logger.warning("another program took VRAM: %s of expert slots stay empty until the next prompt", short)

    def statistics(self) -> ExpertStatistics:
        dispatch = self._device.counters if self._device else self.dispatcher.counters
        moved = self.mover.counters
        ring = self._ring
        by_tier = dispatch.by_tier
        memory = self.store.memory
        return ExpertStatistics(
            num_calls=dispatch.num_calls,
            hits=by_tier[Tier.VRAM],
            misses_pinned=by_tier[Tier.PINNED],
            misses_pageable=by_tier[Tier.PAGEABLE],
            misses_mapped=by_tier[Tier.MAPPED],
            misses_file=by_tier[Tier.FILE],
            alias_picks=dispatch.num_alias,
            handed_over=dispatch.num_handed_over,
            stale_generations=dispatch.num_stale,
            direct_bytes=moved.direct_bytes,
            direct_runs=moved.direct_runs,
            staged_bytes=moved.staged_bytes,
            file_bytes=moved.file_bytes,
            saved_bytes=moved.saved_bytes,
            ring_loads=self._ring_loads + (ring.num_loads if ring else 0),
            ring_unused=self._ring_unused + (ring.num_unused if ring else 0),
            slots_lent=self._lender.num_lent,
            slots_refilled=self._lender.num_refilled,
            swaps=self.swaps.num_done,
            swaps_pinned=self.swaps.num_from[Tier.PINNED],
            swaps_pageable=self.swaps.num_from[Tier.PAGEABLE],
            swaps_mapped=self.swaps.num_from[Tier.MAPPED],
            swaps_file=self.swaps.num_from[Tier.FILE],
            swaps_copied_back=self.swaps.num_copied_back,
            buffer_waits=self.mover.buffers.num_waits,
            loaded_bytes=self._loaded_bytes,
            experts_in_vram=int(np.count_nonzero(self.store.slots.slot_of >= 0)),
            experts_in_ram=int(np.count_nonzero(self.store.place_of >= 0)),
            experts_pinned=int(np.count_nonzero(memory.aliases)) if memory else 0,
            pinned_bytes=memory.pinned_bytes if memory else 0,
            page_lock_seconds=memory.seconds if memory else 0.0,
            page_lock_path=memory.path if memory else 0,
            version=self.store.version,
        )

    def close(self) -> None:
        """Waits for what moves and frees everything, in the reverse order of taking it. May be called twice."""
        self._owned.close()

    def _fill_slots(self, placement: Placement, loader: Stager, report: Callable[[int], None]) -> None:
        with self.mover.staged_by(loader):
            fill_slots(self.store, self.mover, placement.vram, report)
        self._source.direct = self.plan.direct_reads
        counters = self.mover.counters
        self._loaded_bytes = len(placement.ram) * self._source.blob_bytes + counters.file_bytes
        counters.direct_bytes = counters.direct_runs = counters.staged_bytes = counters.file_bytes = 0
        self.mover.buffers.num_waits = 0

    def count_picks(self) -> NDArray[np.int64]:
        """[layers, experts] rows that picked each expert since the start; between rounds only."""
        self._collect_picks()
        return self._picks.copy()

    def _collect_picks(self) -> None:
        fresh = (self._device or self.dispatcher).take_picks()
        self._picks += fresh
        self._fresh_picks += fresh

    def _adapt(self) -> None:
        self._collect_picks()
        self._heat = decay_counts(self._heat, self._fresh_picks)
        self._fresh_picks = np.zeros_like(self._picks)
        room = min(self.plan.request.adapt_swaps, len(self.swaps.spares))
        busy = self.swaps.busy()
        for swap in choose_swaps(self._heat, self.store.in_vram(), room, self.plan.shape.draft_layers):
            if not busy & set(swap):
                self.swaps.start(swap)

    def _open_ring(self, num_picks: int) -> PromptRing | None:
        """The ring of the running prompt, borrowed now if there is none; None where a prompt streams nothing."""
        if self._ring is None and self._ring_limit:
            self._ring = PromptRing(self.mover, self._take_ring(2 * min(self.store.num_experts, num_picks)))
        assert not isinstance(self._ring, CardStream), "a card streams by itself"
        return self._ring

    def _take_ring(self, most: int, nbytes: int = 0) -> list[int]:
        """Addresses of slots for a prompt: borrowed, at most ``most``, or those that are reserved."""
        self.swaps.finish()
        slots = self.store.slots
        if not self.plan.ring_borrowed:
            first = self.plan.num_slots + self.plan.num_spares
            return [slots.slot_address(slot) for slot in range(first, first + self._ring_limit)]
        addresses = self._lender.lend(min(self._ring_limit, most), keep=set(self.swaps.spares), nbytes=nbytes)
        borrowed = count_of(len(addresses), "slot")
        buffers = f", and {count_of(lent_slots(nbytes, slots.stride), 'slot')} for its buffers" if nbytes else ""
        logger.info("the prompt borrows %s (%s)%s", borrowed, format_bytes(len(addresses) * slots.stride), buffers)
        return addresses


def _count_bytes(
    plan: ResolvedPlan, source: ExpertSource, placement: Placement, progress: Progress | None
) -> Callable[[int], None]:
    """Tells ``progress`` of a load's bytes as they come."""
    total = len(placement.ram) * source.blob_bytes + len(placement.vram) * plan.stride
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return report
