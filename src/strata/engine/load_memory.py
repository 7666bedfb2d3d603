"""Everything that a load takes before it reads: what the card gives to weights, and RAM for the experts.

Lives in ``engine`` because plan, reader and device meet here. In this order, because a driver may charge page-locked
RAM to the card, and page-locking goes on beside all that follows. It must not read a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.engine.dense_block import DensePlacer, take_block
from strata.engine.devices import hold_to_plan, named_refusals
from strata.experts.profile import find_profile
from strata.experts.source import BlobPlace
from strata.experts.taking import TakenMemory, take_experts
from strata.kernels.host import HostBackend, HostFaults, PageLocks
from strata.memory import planner

if TYPE_CHECKING:
    from contextlib import ExitStack

    import numpy as np
    from numpy.typing import NDArray

    from strata.checkpoint.pack_reader import PackReader
    from strata.config import Requested
    from strata.engine.devices import RoundDevice
    from strata.engine.models import OpenModel
    from strata.kernels.backend import Backend
    from strata.memory.planner import ResolvedPlan

__all__ = ["LoadMemory", "take_memory"]


@dataclass(frozen=True)
class LoadMemory:
    """What was taken for a model before anything of it is read. ``place`` puts dense weights onto a card."""

    backend: Backend
    place: DensePlacer | None
    file: PackExperts
    heat: NDArray[np.float64] | None
    experts: TakenMemory


def take_memory(
    opened: OpenModel,
    requested: Requested,
    plan: ResolvedPlan,
    device: RoundDevice | None,
    owned: ExitStack,
    faults: HostFaults,
    locks: PageLocks | None,
) -> LoadMemory:
    """All that a card gives to weights, then RAM for the experts, whose page-locking goes on beside what follows."""
    block = None
    if device is None:
        # The device holds the slots and nothing else here, so its cap is exactly what the plan gives them.
        cap = planner.whole_pages(plan.num_device_slots * plan.stride)
        backend: Backend = HostBackend(cap, faults, locks)
        owned.callback(backend.close)
    else:
        owned.callback(hold_to_plan(device, plan))
        with named_refusals(device, "the dense weights"):
            backend, block = device.backend, take_block(opened.reader, device)
    file = PackExperts(opened.reader)
    reader = opened.reader
    profile = find_profile(reader.folder, reader.digest, file.num_layers, file.num_experts)
    heat = None if profile is None else profile.heat(requested.adapt_every)
    experts = take_experts(plan, file, backend, heat)
    owned.callback(experts.owned.close)  # of nothing once the system has taken it over
    place = None
    if block is not None:
        place = DensePlacer(block, backend, experts.buffers, plan.stride)  # the experts need their buffers later
        owned.callback(place.close)
    return LoadMemory(backend, place, file, heat, experts)


class PackExperts:
    """A pack's routed experts as the expert system asks for them (``experts.source.ExpertFile``)."""

    def __init__(self, reader: PackReader) -> None:
        assert reader.layout is not None, "the pack has experts"
        self._reader = reader
        self.num_layers = len(reader.expert_layers)
        self.num_experts = reader.num_experts
        self.blob_bytes = reader.layout.blob_bytes
        self.scales = reader.tensor_scales.numpy()

    def place(self, layer: int, expert: int) -> BlobPlace:
        where = self._reader.expert_location(self._reader.expert_layers[layer], expert)
        return BlobPlace(where.path, where.offset, where.nbytes, where.checksum, where.recipe)
