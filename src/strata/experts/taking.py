"""Takes the memory that a plan gives to experts: slots, the copy in RAM, staging buffers; and who starts where.

Lives in ``experts`` beside ``system``, which owns what is taken here. Everything is put on the caller's stack to be
given back in the reverse order. It must not plan, and moves no expert.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata.errors import MemoryPlanError, StrataError
from strata.experts.policy import rank_experts
from strata.experts.slots import SlotCache
from strata.experts.source import ExpertFile
from strata.kernels.backend import Backend, Buffer, DeviceMemoryFull, DeviceStream, PinRefused
from strata.memory.locked_memory import LockedMemory
from strata.memory.page_lock import take_memory
from strata.memory.planner import LENT_PIECE, ResolvedPlan, format_bytes
from strata.memory.stager_sizing import StagerSizing, size_stager
from strata.memory.system import system
from strata.words import count_of

__all__ = [
    "Placement",
    "TakenMemory",
    "size_staging",
    "synchronize_quietly",
    "take_buffers",
    "take_experts",
    "warn_of_little_memory",
]

logger = logging.getLogger(__name__)
FEWEST_BUFFERS = 16
LITTLE_MEMORY = 256 << 20  # below this a driver starts to move memory out of the device


class Placement:
    """Who goes where at the start: ``vram`` and ``ram`` are flat numbers in the order of slots and places."""

    def __init__(self, plan: ResolvedPlan, heat: NDArray[np.float64]) -> None:
        ranked = rank_experts(heat).tolist()
        self.total = len(ranked)
        self.vram: list[int] = ranked[: plan.num_slots]
        complement = ranked[plan.num_slots :]
        if plan.mode == "arena":
            chosen = ranked
        else:  # the hottest outside VRAM, then copies of the last slots, which are lent first
            chosen = (complement + self.vram[::-1])[: plan.num_ram_experts]
        assert len(chosen) == plan.num_ram_experts, "the plan counts the experts in RAM"
        hottest_first = plan.request.pin.partial and plan.mode == "budget"
        self.ram: list[int] = chosen if hottest_first else sorted(chosen)
        self.num_outside = len(complement)

    def outside_vram(self) -> NDArray[np.bool_]:
        """One flag a place: it holds an expert that starts outside VRAM."""
        return ~np.isin(np.array(self.ram), np.array(self.vram))


@dataclass(frozen=True)
class TakenMemory:
    """Memory of a plan's experts before anything is in it; the copy in RAM may still be being page-locked. Whoever
    has it closes ``owned``, or takes what is in it over."""

    placement: Placement
    slots: SlotCache
    buffers: list[int]  # addresses of the first staging buffers
    ram: LockedMemory | None
    owned: ExitStack


def take_experts(
    plan: ResolvedPlan, file: ExpertFile, backend: Backend, heat: NDArray[np.float64] | None
) -> TakenMemory:
    """Takes slots, a few staging buffers and the copy in RAM, whose page-locking goes on after the return.

    ``heat`` [layers, experts] ranks experts; None: all equal. Raises ``MemoryPlanError``; nothing stays taken then.
    """
    with ExitStack() as owned:
        placement = Placement(plan, np.zeros((file.num_layers, file.num_experts)) if heat is None else heat)
        slots = _take_slots(plan, file, backend, owned)
        # The few staging buffers first: page-locking the copy may go on until the driver refuses.
        buffers = take_buffers(plan, FEWEST_BUFFERS, backend, owned)
        ram = _take_ram(plan, file, backend, placement, owned)
        return TakenMemory(placement, slots, buffers, ram, owned.pop_all())


def _take_slots(plan: ResolvedPlan, file: ExpertFile, backend: Backend, owned: ExitStack) -> SlotCache:
    address, lendable = 0, None
    if plan.num_device_slots:
        nbytes = plan.num_device_slots * plan.stride
        try:
            if plan.lent_bytes:
                buffer: Buffer = (lendable := backend.allocate_lendable(nbytes, LENT_PIECE))
            else:
                buffer = backend.allocate(nbytes)
        except DeviceMemoryFull as full:
            raise MemoryPlanError(
                f"the device refuses {format_bytes(nbytes)} of expert slots, {format_bytes(full.free)} are free",
                "another program took memory since the plan: try again, or raise --vram-reserve-mib",
                short_bytes=full.asked - full.free,
            ) from full
        owned.callback(buffer.free)
        address = buffer.address
    return SlotCache(address, plan.num_device_slots, plan.stride, file.num_layers * file.num_experts, lendable)


def _take_ram(
    plan: ResolvedPlan, file: ExpertFile, backend: Backend, placement: Placement, owned: ExitStack
) -> LockedMemory | None:
    if not placement.ram:
        return None
    pin = plan.request.pin
    level = logging.INFO
    if plan.device.kind == "cpu" and not plan.num_device_slots:
        level = logging.DEBUG  # page-locking is no matter of a machine whose processor computes everything
        logger.debug("there is no device that could read the expert copy: nothing is pinned")
        pin = replace(pin, rule="none")
    elif pin.rule == "none" and plan.mode == "arena":
        logger.info("STRATA_ARENA_PIN_GIB=none: nothing of the expert arena is pinned")
    elif pin.rule == "none":
        logger.info("STRATA_COMPLEMENT_PIN_GIB=0: nothing of the resident copy is pinned")
    needed = None
    if pin.by_need:
        needed = placement.outside_vram()
    memory = take_memory(
        backend,
        len(placement.ram),
        plan.stride,
        pin,
        limit=plan.pin_limit,
        slice_bytes=file.num_experts * plan.stride,
        needed=needed,
        num_cpus=plan.request.num_cpus,
        level=level,
        wait=False,
    )
    owned.callback(memory.close)
    return memory


def size_staging(plan: ResolvedPlan, memory: LockedMemory | None, placement: Placement) -> StagerSizing:
    """The stager's sizes for what was really page-locked of the experts outside VRAM; one log line.

    The page-locking is over. An arena and copies of lendable slots hold experts of VRAM too: a prompt reads those in
    their slots.
    """
    pinned = 0 if memory is None else int(np.count_nonzero(memory.aliases[placement.outside_vram()]))
    share = 1.0 - pinned / placement.num_outside if placement.num_outside else 0.0
    sizing = size_stager(plan.request, plan.mode, unpinned_share=share)
    if placement.num_outside and plan.ring_slots and plan.ram["staging"]:
        logger.info(
            "prompt stream: %.0f %% of the experts outside VRAM are not pinned, they come from %s: %s, "
            "%s (%.1f MiB), ring %s (%s)",
            100 * share,
            sizing.source,
            count_of(sizing.num_threads, "thread"),
            count_of(sizing.num_buffers, "buffer"),
            sizing.num_buffers * plan.stride / (1 << 20),
            count_of(min(plan.ring_slots, sizing.ring_slots), "slot"),
            sizing.reason,
        )
    return sizing


def take_buffers(plan: ResolvedPlan, count: int, backend: Backend, owned: ExitStack) -> list[int]:
    """Addresses of ``count`` staging buffers, page-locked where the device grants it; none where nothing is staged."""
    count = min(count, plan.ram["staging"] // plan.stride)
    if count <= 0:
        return []
    try:
        buffer, registration = backend.allocate_pinned(count * plan.stride, mapped=False)
        owned.callback(buffer.free)
        owned.callback(registration.unregister)
        address = buffer.address
    except PinRefused as refusal:
        logger.info("%s not pinned: %s", count_of(count, "staging buffer"), refusal)
        region = system.map_region(count * plan.stride)
        owned.callback(region.free)
        address = region.address
    return [address + index * plan.stride for index in range(count)]


def warn_of_little_memory(backend: Backend) -> None:
    info = backend.info()
    if info.kind == "cuda" and info.memory_free < LITTLE_MEMORY:
        logger.warning("only %d MiB of VRAM free: raise --vram-reserve-mib", info.memory_free >> 20)


def synchronize_quietly(stream: DeviceStream) -> None:
    """Nothing copies any more afterwards. What failed before was already reported to whoever waited for it."""
    with suppress(StrataError):
        stream.synchronize()
