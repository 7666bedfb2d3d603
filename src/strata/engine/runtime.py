"""A model loaded under one plan: weights, experts in their tiers, the operations, and nothing else to decide.

Lives in ``engine`` as the one place where a request becomes a plan and a plan becomes memory. Sessions compute on it;
arms of ``strata verify`` open several in a row over the same dense weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.checkpoint.pack_writer import Progress
from strata.config import Requested
from strata.config_sources import Effect
from strata.engine.devices import (
    RoundDevice,
    card_room,
    choose_card,
    compile_kernels,
    give_back_tensors,
    has_tensor_cores,
    named_refusals,
    open_device,
)
from strata.engine.link_share import choose_link_share
from strata.engine.load_memory import LoadMemory, take_memory
from strata.engine.memory_use import MemoryUse, measure_use
from strata.engine.models import OpenModel
from strata.engine.planning import (
    choose_chunk_rows,
    choose_context,
    device_room,
    memory_request,
    request_of_card,
    request_of_windows,
)
from strata.engine.rates import threads_asked
from strata.engine.sequence import HostSequence, TokenSequence
from strata.engine.shape import model_shape
from strata.experts.statistics import ExpertStatistics
from strata.experts.system import ExpertSystem
from strata.kernels.cpu import pool
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.cpu.library import isa
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.host import HostFaults, PageLocks
from strata.memory import planner
from strata.memory.page_lock import SYSTEM_LOCKS
from strata.memory.planner import format_bytes
from strata.memory.probe import Machine, probe_machine
from strata.memory.read_ahead import ReadAhead
from strata.stages import Stage, Stages, format_stages
from strata.words import count_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from strata.engine.device_rounds import DeviceRounds
    from strata.experts.injection import Witness
    from strata.kernels.backend import Backend
    from strata.kernels.cuda.card_rates import CardRates
    from strata.kernels.ops import ExpertExecutor
    from strata.kvcache.attention_cache import KvFormat
    from strata.memory.planner import ResolvedPlan
    from strata.models.family import Model, Weights

__all__ = ["Runtime", "RuntimeStatistics", "make_plan"]

logger = logging.getLogger(__name__)

WAITING_THREADS = 1  # look for a card's answer all the time that a round takes


@dataclass(frozen=True)
class RuntimeStatistics:
    """``ready_seconds``: from the start of loading to the first round possible. ``mailbox_microseconds``: an exchange
    with a card, measured then; 0 on the CPU, and where the host hands over instead (``mailbox``)."""

    ready_seconds: float
    threads: int
    mailbox_microseconds: float
    experts: ExpertStatistics


def make_plan(
    model: OpenModel, requested: Requested, machine: Machine, device: RoundDevice | None = None
) -> ResolvedPlan:
    """Every byte, before anything is taken. ``device``: an opened card; None: the CPU computes.

    Raises ``MemoryPlanError`` or ``ConfigError``.
    """
    context = choose_context(requested, model.config.max_positions)
    chunk = choose_chunk_rows(requested)
    shape = model_shape(model, kv_format(requested))
    request = memory_request(requested, machine, context, chunk)
    if device is None:
        return planner.plan(shape, request, device_room(requested))
    room = card_room(requested, machine, device)
    if not has_tensor_cores(device):
        return planner.plan(shape, request_of_windows(request), room)
    return planner.plan(shape, request_of_card(request, requested, shape, room), room)


def probe(requested: Requested) -> Machine:
    """The machine, with ``--ram-gib`` in place of what it says."""
    ram = requested.ram_gib
    return probe_machine(ram_bytes=None if ram is None else int(ram * planner.GIB))


def kv_format(requested: Requested) -> KvFormat:
    return "f32" if requested.kv == 32 else "bf16"


def _followed(ahead: ReadAhead, on_progress: Progress | None) -> Progress:
    """``on_progress``, and ``ahead`` told how many bytes of dense weights were read."""

    def tell(phase: str, done: int, total: int) -> None:
        ahead.reached(done)
        if on_progress is not None:
            on_progress(phase, done, total)

    return tell


class Runtime:
    """Owns device memory, the expert tiers and their threads; borrows the open model. Close once.

    A closed one holds no weights, state or buffers, whoever still holds it: the next is planned over what is free.
    """

    def __init__(
        self,
        model: Model,
        plan: ResolvedPlan,
        experts: ExpertSystem,
        device: RoundDevice | None,
        backend: Backend,
        kv: KvFormat,
        threads: int,
        ready_seconds: float,
        name: str,
        stages: tuple[Stage, ...],
        rounds: DeviceRounds | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.ops = CpuOps()
        self.kv = kv
        self.rounds = rounds
        self.stages = stages
        self.vocabulary = model.config.vocabulary
        self._system = experts
        self._device = device
        self._backend = backend
        self._name = name
        self._threads = threads
        self._ready_seconds = ready_seconds
        self._owned = ExitStack()

    @classmethod
    def open(
        cls,
        opened: OpenModel,
        requested: Requested,
        *,
        faults: HostFaults = HostFaults(),
        injection: Witness | None = None,
        on_progress: Progress | None = None,
        device: RoundDevice | None = None,
        locks: PageLocks | None = SYSTEM_LOCKS,
    ) -> Runtime:
        """Plans, takes the memory, loads. ``faults``, ``injection``, ``device`` and ``locks`` (None: without a card
        page-locking is counted and not done) are for ``strata verify`` and tests; a ``device`` given stays the
        caller's to close."""
        stages = Stages()
        with ExitStack() as owned:
            with stages.of("probe"):
                machine = probe(requested)
            ahead = ReadAhead(opened.unread_file)  # the drive works while a card is opened and memory is taken
            owned.callback(ahead.close)
            with stages.of("card"):
                if device is None and (card := choose_card(requested, machine)) is not None:
                    opened_card = open_device(requested, card)
                    owned.callback(opened_card.close)
                    device = opened_card
            if device is not None:
                with stages.of("kernels"):  # before memory is planned and taken: the compiler needs some
                    compile_kernels(device)
            with stages.of("plan"):
                plan = make_plan(opened, requested, machine, device)
            for line in plan.lines():
                logger.debug(line)
            threads = pool.configure(threads_asked(requested, busy=0 if device is None else WAITING_THREADS))
            with stages.of("link share"):  # before memory is taken: measuring needs some
                misses = plan.num_slots < plan.shape.total_experts
                link_share = choose_link_share(requested, device) if misses else 0.0
            with stages.of("memory"):
                memory = take_memory(opened, requested, plan, device, owned, faults, locks)
            backend = memory.backend
            with stages.of("dense weights"):
                weights: Weights
                tell = _followed(ahead, on_progress)
                if memory.place is None:
                    weights = opened.dense(tell)
                else:
                    weights = opened.dense_elsewhere(memory.place, tell)
                    memory.place.finish()
                    memory.place.close()
                ahead.close()
            with stages.of("model built"):
                model = opened.family.build(opened.config, weights)
            experts = cls._open_experts(opened, requested, plan, memory, link_share, injection, on_progress, stages)
            owned.callback(experts.close)
            rounds = None
            if device is not None:
                with named_refusals(device, "the state and buffers of rounds"):
                    rounds = cls._open_rounds(opened, requested, plan, model, experts, device, stages)
                owned.callback(rounds.close)
            ready = time.perf_counter() - stages.began
            logger.debug("stages: %s", format_stages(stages.in_order()))
            logger.info("ready in %.2f s", ready)
            kv = kv_format(requested)
            runtime = cls(
                model, plan, experts, device, backend, kv, threads, ready, opened.name, stages.in_order(), rounds
            )
            runtime._owned = owned.pop_all()
            return runtime

    @staticmethod
    def _open_experts(
        opened: OpenModel,
        requested: Requested,
        plan: ResolvedPlan,
        memory: LoadMemory,
        link_share: float,
        injection: Witness | None,
        on_progress: Progress | None,
        stages: Stages,
    ) -> ExpertSystem:
        layout = opened.reader.layout
        assert layout is not None, "a family without routed experts is not served"
        tell = (lambda done, total: on_progress("experts", done, total)) if on_progress else None
        return ExpertSystem.open(
            plan,
            memory.file,
            ExpertKernel(layout),
            memory.backend,
            heat=memory.heat,
            pcie_fraction=link_share,
            pcie_balance=requested.pcie_balance,
            injection=injection,
            progress=tell,
            taken=memory.experts,
            stages=stages,
        )

    @staticmethod
    def _open_rounds(
        opened: OpenModel,
        requested: Requested,
        plan: ResolvedPlan,
        model: Model,
        experts: ExpertSystem,
        device: RoundDevice,
        stages: Stages,
    ) -> DeviceRounds:
        from strata.engine.device_rounds import DeviceRounds

        layout = opened.reader.layout
        assert layout is not None
        context = plan.request.max_context
        with stages.of("state of rounds"):
            rounds = DeviceRounds(
                model, experts, layout, device.machine, device.backend, context, kv_format(requested),
                by_hand=requested.mailbox == "off", stages=stages,
                chunk_rows=plan.request.chunk_rows if plan.request.in_chunks else None,
                even_chunks=requested.prefill.is_auto,
            )  # fmt: skip
        try:
            rounds.prepare()
        except BaseException:
            rounds.close()
            raise
        return rounds

    def close(self) -> None:
        try:
            self._owned.close()
        finally:
            self.rounds = None
            del self.model
        if self._device is not None:
            give_back_tensors()

    def new_sequence(self) -> TokenSequence:
        """An empty sequence. A card holds one: the one before is not alive any more."""
        if self.rounds is not None:
            return self.rounds.new_sequence()
        return HostSequence(self.model, self.ops, self.experts, lambda: self.model.new_state(self.max_context, self.kv))

    @property
    def experts(self) -> ExpertExecutor:
        return self._system.dispatcher

    @property
    def max_context(self) -> int:
        return self.plan.request.max_context

    @property
    def chunk_rows(self) -> int:
        return self.plan.request.chunk_rows

    def end_round(self) -> None:
        """Lets swaps make progress; called after each decode round."""
        self._system.end_round()

    def count_picks(self) -> NDArray[np.int64]:
        """[layers, experts] rows that picked each expert since the start; between rounds only."""
        return self._system.count_picks()

    @property
    def num_launches(self) -> int:
        """Launches of a round of one row on a card; 0 on the CPU."""
        return 0 if self.rounds is None else len(self.rounds.launches(1))

    def card_rates(self) -> CardRates | None:
        """What the card and its link give now, measured between rounds; None on the CPU."""
        if self._device is None:
            return None
        from strata.kernels.cuda.card_rates import measure_card

        return measure_card(self._device.machine, self._device.backend, self.num_launches)

    def measure_together(self, read: Callable[[], float]) -> float | None:
        """What ``read``, which measures the CPU's rate, and copies over a card's link give at once; bytes a second."""
        if self._device is None:
            return None
        from strata.kernels.cuda.card_rates import measure_together

        return measure_together(self._device.backend, read)

    def memory_use(self) -> MemoryUse:
        """What was taken so far, beside the plan."""
        return measure_use(self.plan, self._backend, self._system.statistics())

    def statistics(self) -> RuntimeStatistics:
        check = None if self.rounds is None else self.rounds.mailbox_check
        exchange = check.microseconds if check is not None else None
        return RuntimeStatistics(self._ready_seconds, self._threads, exchange or 0.0, self._system.statistics())

    def mailbox_effect(self) -> Effect | None:
        """What the mailbox's self-test said; None where there was none."""
        check = None if self.rounds is None else self.rounds.mailbox_check
        if check is None:
            return None
        if check.microseconds is None:
            return Effect("mailbox", False, f"{check.reason}: the host hands over the CPU's part of each layer")
        return Effect("mailbox", True, f"tested: {check.microseconds:.1f} us an exchange")

    def _mailbox_words(self) -> str:
        microseconds = self.statistics().mailbox_microseconds
        return f" (mailbox {microseconds:.1f} us)" if microseconds else " (no mailbox)"

    def describe(self) -> str:
        """One line: the model, its size, where it runs, where its experts lie."""
        shape, plan = self.plan.shape, self.plan
        experts = format_bytes(shape.total_experts * shape.blob_bytes)
        threads = count_of(self._threads, "thread")
        device = self._backend.info()
        card = f"{device.name}{self._mailbox_words()} and " if device.kind == "cuda" else ""
        return (
            f"{self._name}: {shape.num_layers} layers of {shape.num_experts} experts ({experts}), "
            f"{format_bytes(shape.dense_bytes)} dense, {card}{threads} ({isa()}), RAM mode {plan.mode}, "
            f"{plan.num_slots:,} slots, context {self.max_context:,}"
        )
