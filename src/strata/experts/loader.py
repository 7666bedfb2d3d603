"""Fills the tiers at the start: the RAM copy straight from the file, then the slots from RAM or the file.

Lives in ``experts`` because it knows which expert goes where (as told by ``policy``). Reads are many at a time, each
straight into its final place, so that the peak is the final size. It must not choose or allocate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from strata.experts.mover import Move, Mover
from strata.experts.source import ExpertSource
from strata.experts.store import ExpertStore
from strata.kernels.cpu.stager import ReadFailure, Stager

__all__ = ["fill_ram", "fill_slots"]

READS_IN_FLIGHT = 64
Progress = Callable[[int], None]


def fill_ram(
    store: ExpertStore, source: ExpertSource, stager: Stager, experts: Sequence[int], progress: Progress | None
) -> None:
    """Reads ``experts`` (flat numbers, in file order) into places 0, 1, ..., each as soon as the page-locking of the
    copy has let it through. ``progress`` gets bytes as they arrive.

    Raises the named error of the first read that failed, or what ended the page-locking; reads under way are finished
    before that.
    """
    assert store.memory is not None, "there is a copy to fill"
    reading: deque[tuple[int, int, int]] = deque()  # (expert, place, ticket)
    open_places = 0
    try:
        for place, expert in enumerate(experts):
            if place >= open_places:
                open_places = store.memory.wait_for(place)
            if len(reading) == READS_IN_FLIGHT:
                _settle(store, stager, reading, source, progress)
            layer, number = divmod(expert, store.num_experts)
            reading.append((expert, place, source.submit(stager, layer, number, store.place_address(place))))
        while reading:
            _settle(store, stager, reading, source, progress)
    except ReadFailure as failure:
        raise source.explain(*divmod(reading[0][0], store.num_experts), failure) from failure
    finally:  # the memory may be freed once this returns, however it ends
        while reading:
            _, _, ticket = reading.popleft()
            _wait_quietly(stager, ticket)


def fill_slots(store: ExpertStore, mover: Mover, experts: Sequence[int], progress: Progress | None) -> None:
    """Copies ``experts`` into slots 0, 1, ... from wherever they lie."""
    moving: deque[tuple[int, Move]] = deque()  # (slot, its move): of one part while the next one is begun

    def settle(until: int) -> None:
        count = len(moving) - until
        for _ in range(count):
            slot, move = moving.popleft()
            mover.wait(move)
            store.slots.admit(move.expert, slot)
        if progress is not None and count > 0:
            progress(count * store.slots.stride)

    for first in range(0, len(experts), READS_IN_FLIGHT):
        part = experts[first : first + READS_IN_FLIGHT]
        slots = range(first, first + len(part))
        moving += zip(slots, mover.load(part, [store.slots.slot_address(slot) for slot in slots]), strict=True)
        settle(len(part))
    settle(0)


def _settle(
    store: ExpertStore,
    stager: Stager,
    reading: deque[tuple[int, int, int]],
    source: ExpertSource,
    progress: Progress | None,
) -> None:
    expert, place, ticket = reading[0]
    stager.wait(ticket)
    reading.popleft()
    store.give_place(expert, place)
    if progress is not None:
        progress(source.blob_bytes)


def _wait_quietly(stager: Stager, ticket: int) -> None:
    try:
        stager.wait(ticket)
    except ReadFailure:
        return
