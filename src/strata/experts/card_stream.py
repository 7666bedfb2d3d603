"""A prompt's experts on a card: those in VRAM where they lie, the others through a ring of slots, without a pause.

Lives in ``experts`` because it joins residency and copies; ``ring.py`` is the same for a device whose kernels the
caller waits for. Copies and compute are ordered on the card: the compute waits for a wave's copies, the copies into a
slot for the wave that used it last, and the host for neither, except where threads stage bytes. All experts that a
layer has outside VRAM are streamed: a long prompt picks nearly every one. It must not compute, nor know a model.

A wave is a few experts of one layer, whose copies are told apart from others' by their events. Waves follow one another
over layers and over the chunks of a prompt, each in the next berth of the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.errors import StrataError
from strata.experts.mover import Move, Mover
from strata.experts.store import ExpertStore
from strata.kernels.backend import DeviceEvent

__all__ = ["CardStream", "ComputeOrder", "LayerOrder"]

WAVE_EXPERTS = 64  # a launch for fewer leaves multiprocessors idle at its end: 32 cost 5 % of a chunk of 32,768 rows
LEAST_WAVES = 6  # that the ring holds: some move while one is computed


class ComputeOrder(Protocol):
    """The stream of a prompt's compute."""

    def wait(self, event: DeviceEvent) -> None:
        """What is enqueued from now on runs after ``event``."""

    def record(self) -> DeviceEvent | None:
        """After everything enqueued so far; None where that is complete already."""


@dataclass(frozen=True)
class LayerOrder:
    """A layer's experts as its waves name them: ``experts`` int32, and ``addresses`` int64 of their blobs. The first
    ``num_inside`` lie in VRAM."""

    experts: NDArray[np.int32]
    addresses: NDArray[np.int64]
    num_inside: int


@dataclass
class _Wave:
    experts: list[int]  # flat numbers
    addresses: list[int]


class CardStream:
    """Streams ``num_chunks`` times over all layers. One thread; ``settle`` before the slots are anybody else's."""

    def __init__(
        self, store: ExpertStore, mover: Mover, slots: Sequence[int], compute: ComputeOrder, num_chunks: int,
        num_layers: int,
    ) -> None:  # fmt: skip
        self._store, self._mover, self._compute = store, mover, compute
        self._wave_experts = max(1, min(WAVE_EXPERTS, len(slots) // LEAST_WAVES))
        ordered = sorted(slots)
        count = max(1, len(slots) // self._wave_experts) if slots else 0
        self._berths = [ordered[i * self._wave_experts : (i + 1) * self._wave_experts] for i in range(count)]
        self._inside = self._find_inside()
        self._num_layers, self._num_chunks = num_layers, num_chunks
        self._coming = self._list_waves()
        self._moving: deque[list[Move]] = deque()
        self._used: list[DeviceEvent | None] = [None] * count  # by berth: after the wave that was in it
        self._started = self._done = 0  # waves
        self._chunk = 0
        self.num_slots = len(slots)
        self.num_loads = self.num_unused = 0
        self._start()

    def begin_chunk(self) -> list[LayerOrder]:
        """The order of every layer's experts in the next chunk."""
        berth = self._chunk * self._waves_of_chunk()
        self._chunk += 1
        found = []
        for layer in range(self._num_layers):
            experts, addresses = (list(part) for part in self._inside[layer])
            num_inside = len(experts)
            outside = self._list_outside(layer)
            for first in range(0, len(outside), self._wave_experts):
                part = outside[first : first + self._wave_experts]
                experts += [flat - layer * self._store.num_experts for flat in part]
                addresses += self._berths[berth % len(self._berths)][: len(part)]
                berth += 1
            found.append(LayerOrder(np.array(experts, np.int32), np.array(addresses, np.int64), num_inside))
        return found

    def waves(self, order: LayerOrder) -> Iterator[tuple[int, int]]:
        """Ranges of the order, one after another, each once the compute that is enqueued next may read its blobs; the
        caller enqueues it before it goes on."""
        if order.num_inside:
            yield 0, order.num_inside
        for first in range(order.num_inside, len(order.experts), self._wave_experts):
            moves = self._moving.popleft()
            reached: DeviceEvent | None = None
            for move in moves:
                event = self._mover.enqueued(move)
                if event is not reached:
                    self._compute.wait(event)
                    reached = event
            yield first, min(first + self._wave_experts, len(order.experts))
            self._used[self._done % len(self._berths)] = self._compute.record()
            self._done += 1
            self._start()

    def settle(self) -> None:
        """Waits for what moves, and drops it. What was enqueued for compute must be complete."""
        for moves in self._moving:
            for move in moves:
                with suppress(StrataError):
                    self._mover.wait(move)
                self.num_unused += 1
        self._moving.clear()
        self._coming = iter(())

    def _start(self) -> None:
        """Starts the copies of as many waves as there are berths whose last wave is enqueued."""
        while self._started - self._done < len(self._berths):
            wave = next(self._coming, None)
            if wave is None:
                return
            used = self._used[self._started % len(self._berths)]
            if used is not None:
                self._mover.stream.wait(used)
            self._moving.append(self._mover.load(wave.experts, wave.addresses))
            self.num_loads += len(wave.experts)
            self._started += 1

    def _list_waves(self) -> Iterator[_Wave]:
        berth = 0
        for _ in range(self._num_chunks):
            for layer in range(self._num_layers):
                outside = self._list_outside(layer)
                for first in range(0, len(outside), self._wave_experts):
                    part = outside[first : first + self._wave_experts]
                    yield _Wave(part, self._berths[berth % len(self._berths)][: len(part)])
                    berth += 1

    def _waves_of_chunk(self) -> int:
        return sum(-(-len(self._list_outside(layer)) // self._wave_experts) for layer in range(self._num_layers))

    def _find_inside(self) -> list[tuple[list[int], list[int]]]:
        """By layer: experts that lie in VRAM, and their addresses."""
        count = self._store.num_experts
        found: list[tuple[list[int], list[int]]] = [([], []) for _ in range(self._store.num_layers)]
        flats, addresses = self._store.slots.valid()
        for flat, address in sorted(zip(flats.tolist(), addresses.tolist(), strict=True)):
            found[flat // count][0].append(flat % count)
            found[flat // count][1].append(address)
        return found

    def _list_outside(self, layer: int) -> list[int]:
        """Flat numbers of a layer's experts that VRAM does not hold."""
        inside, first = set(self._inside[layer][0]), layer * self._store.num_experts
        return [first + expert for expert in range(self._store.num_experts) if expert not in inside]
