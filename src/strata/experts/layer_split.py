"""Experts of one model over several devices: each layer belongs to one, which alone reads that layer's experts.

Lives in ``experts`` because a layer's device decides its tiers: every device has an ``ExpertSystem`` of its own layers,
with its own slots, copy and ring, so that no address of one is ever given to another. It must not plan or compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata.experts.source import BlobPlace, ExpertFile
from strata.experts.system import ExpertSystem

if TYPE_CHECKING:
    import torch

__all__ = ["LayerRange", "LayerSplit", "split_layers"]


def split_layers(num_layers: int, rooms: Sequence[int]) -> list[range]:
    """Neighbouring layers for each device, in proportion to the bytes that it has free, at least one each."""
    assert rooms, "a model lies on a device"
    assert all(room > 0 for room in rooms), "a device without room gets no layer"
    assert num_layers >= len(rooms), "every device gets a layer"
    total, taken, first = sum(rooms), 0, 0
    found = []
    for index, room in enumerate(rooms):
        taken += room
        rest = len(rooms) - index - 1
        end = min(max(first + 1, (2 * num_layers * taken + total) // (2 * total)), num_layers - rest)
        found.append(range(first, end))
        first = end
    return found


@dataclass(frozen=True)
class LayerRange:
    """``ExpertFile`` of some neighbouring layers of another; layer 0 is the first of them."""

    file: ExpertFile
    layers: range

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        return self.file.num_experts

    @property
    def blob_bytes(self) -> int:
        return self.file.blob_bytes

    @property
    def scales(self) -> NDArray[np.float32]:
        return self.file.scales[self.layers.start : self.layers.stop]

    def place(self, layer: int, expert: int) -> BlobPlace:
        return self.file.place(self.layers[layer], expert)


class LayerSplit:
    """An ``ExpertExecutor`` over the systems of devices. ``systems[i]`` holds the layers ``ranges[i]``; it owns them.

    One thread calls it. A device's ring is open until its next decode window or ``end_prompt``.
    """

    def __init__(self, ranges: Sequence[range], systems: Sequence[ExpertSystem]) -> None:
        assert [layer for part in ranges for layer in part] == list(range(ranges[-1].stop)), "each layer has one device"
        self.systems = tuple(systems)
        self._device_of = [device for device, part in enumerate(ranges) for _ in part]
        self._first = [part.start for part in ranges]

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        device = self._device_of[layer]
        return self.systems[device].dispatcher(layer - self._first[device], x_TH, ids_TK, weights_TK)

    def end_round(self) -> None:
        for system in self.systems:
            system.end_round()

    def end_prompt(self) -> None:
        for system in self.systems:
            system.end_prompt()

    def close(self) -> None:
        for system in self.systems:
            system.close()
