"""A model loaded under one plan: weights, experts in their tiers, the operations, and nothing else to decide.

Lives in ``engine`` as the one place where a request becomes a plan and a plan becomes memory. Sessions compute on it;
arms of ``strata verify`` open several in a row over the same dense weights.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.checkpoint.pack_writer import Progress
from strata.config import Requested
from strata.engine.models import OpenModel
from strata.engine.planning import choose_chunk_rows, choose_context, choose_device, device_room, memory_request
from strata.engine.shape import model_shape
from strata.experts.profile import read_profile
from strata.experts.source import BlobPlace
from strata.experts.statistics import ExpertStatistics
from strata.experts.system import ExpertSystem
from strata.kernels.cpu import pool
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.cpu.library import isa
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.host import HostBackend, HostFaults
from strata.memory import planner
from strata.memory.planner import format_bytes
from strata.memory.probe import Machine, probe_machine
from strata.words import count_of

if TYPE_CHECKING:
    from strata.checkpoint.pack_reader import PackReader
    from strata.experts.injection import FaultInjection
    from strata.kernels.ops import ExpertExecutor
    from strata.kvcache.attention_cache import KvFormat
    from strata.memory.planner import ResolvedPlan
    from strata.models.family import Model, Weights

__all__ = ["Runtime", "RuntimeStatistics", "make_plan"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuntimeStatistics:
    """``ready_seconds``: from the start of loading to the first round possible."""

    ready_seconds: float
    threads: int
    experts: ExpertStatistics


def make_plan(model: OpenModel, requested: Requested, machine: Machine) -> ResolvedPlan:
    """Every byte, before anything is taken. Raises ``MemoryPlanError`` or ``ConfigError``."""
    choose_device(requested, machine)
    context = choose_context(requested, model.config.max_positions)
    chunk = choose_chunk_rows(requested)
    shape = model_shape(model, kv_format(requested))
    return planner.plan(shape, memory_request(requested, machine, context, chunk), device_room(requested))


def probe(requested: Requested) -> Machine:
    """The machine, with ``--ram-gib`` in place of what it says."""
    ram = requested.ram_gib
    return probe_machine(ram_bytes=None if ram is None else int(ram * planner.GIB))


def kv_format(requested: Requested) -> KvFormat:
    return "f32" if requested.kv == 32 else "bf16"


class Runtime:
    """Owns device memory, the expert tiers and their threads; borrows the open model. Close once."""

    def __init__(
        self,
        model: Model,
        plan: ResolvedPlan,
        experts: ExpertSystem,
        backend: HostBackend,
        kv: KvFormat,
        threads: int,
        ready_seconds: float,
        name: str,
    ) -> None:
        self.model = model
        self.plan = plan
        self.ops = CpuOps()
        self.kv = kv
        self._system = experts
        self._backend = backend
        self._name = name
        self._threads = threads
        self._ready_seconds = ready_seconds

    @classmethod
    def open(
        cls,
        opened: OpenModel,
        requested: Requested,
        *,
        faults: HostFaults = HostFaults(),
        injection: FaultInjection | None = None,
        on_progress: Progress | None = None,
    ) -> Runtime:
        """Plans, takes the memory, loads. ``faults`` and ``injection`` are for ``strata verify`` and tests."""
        began = time.perf_counter()
        plan = make_plan(opened, requested, probe(requested))
        for line in plan.lines():
            logger.debug(line)
        threads = pool.configure(None if isinstance(requested.threads, str) else requested.threads)
        weights: Weights = opened.dense(on_progress)
        model = opened.family.build(opened.config, weights)
        layout = opened.reader.layout
        assert layout is not None, "a family without routed experts is not served"
        # The device holds the slots and nothing else here, so its cap is exactly what the plan gives them.
        backend = HostBackend(-(-plan.num_device_slots * plan.stride // planner.PAGE) * planner.PAGE, faults)
        tell = (lambda done, total: on_progress("experts", done, total)) if on_progress else None
        file = PackExperts(opened.reader)
        try:
            profile = read_profile(opened.reader.folder, file.num_layers, file.num_experts)
            experts = ExpertSystem.open(
                plan,
                file,
                ExpertKernel(layout),
                backend,
                heat=None if profile is None else profile.heat(requested.adapt_every),
                pcie_fraction=0.0 if isinstance(requested.pcie_frac, str) else requested.pcie_frac,
                pcie_balance=requested.pcie_balance,
                injection=injection,
                progress=tell,
            )
        except BaseException:
            backend.close()
            raise
        ready = time.perf_counter() - began
        logger.info("ready in %.2f s", ready)
        return cls(model, plan, experts, backend, kv_format(requested), threads, ready, opened.name)

    def close(self) -> None:
        self._system.close()
        self._backend.close()

    @property
    def experts(self) -> ExpertExecutor:
        return self._system.dispatcher

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocabulary

    @property
    def max_context(self) -> int:
        return self.plan.request.max_context

    @property
    def chunk_rows(self) -> int:
        return self.plan.request.chunk_rows

    def end_round(self) -> None:
        """Lets swaps make progress; called after each decode round."""
        self._system.end_round()

    def statistics(self) -> RuntimeStatistics:
        return RuntimeStatistics(self._ready_seconds, self._threads, self._system.statistics())

    def describe(self) -> str:
        """One line: the model, its size, where it runs, where its experts lie."""
        shape, plan = self.plan.shape, self.plan
        experts = format_bytes(shape.total_experts * shape.blob_bytes)
        threads = count_of(self._threads, "thread")
        return (
            f"{self._name}: {shape.num_layers} layers of {shape.num_experts} experts ({experts}), "
            f"{format_bytes(shape.dense_bytes)} dense, {threads} ({isa()}), RAM mode {plan.mode}, "
            f"{plan.num_slots:,} slots, context {self.max_context:,}"
        )


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
        return BlobPlace(where.path, where.offset, where.nbytes, where.checksum)
