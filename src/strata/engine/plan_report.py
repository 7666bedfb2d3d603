"""``strata plan``: one model on one machine as a plan for people and programs, with nothing read or taken.

Lives in ``engine`` because it joins a subject, the configuration, the planner and the forecast. What it says is what
loading would do; only a card may be planned for that is not there yet.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.engine.devices import choose_card
from strata.engine.early_card import card_index
from strata.engine.effects import plan_effects
from strata.engine.forecast import Forecast, forecast, unmeasured
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.planning import (
    choose_chunk_rows,
    choose_context,
    device_room,
    memory_request,
    request_of_card,
)
from strata.engine.rates import threads_asked
from strata.engine.runtime import kv_format
from strata.errors import ConfigError
from strata.memory import planner
from strata.memory.planner import GIB, ResolvedPlan, format_bytes
from strata.memory.requests import DeviceRoom
from strata.words import count_of

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.config_sources import Effect
    from strata.engine.rates import Rates
    from strata.memory.probe import Machine

__all__ = ["PlanReport", "plan_room", "plan_subject", "planned_effects", "report"]

PLAN_ONLY = "plan only: no card that could be used is in this machine"


@dataclass(frozen=True)
class PlanReport:
    """A plan and what it is about. ``plan_only``: it is for a card that is not here. ``forecast`` is None where this
    machine was never measured, where ``unmeasured`` is lacking, or a card is planned."""

    subject: PlanSubject
    plan: ResolvedPlan
    requested: Requested
    ram_rule: str
    plan_only: bool = False
    forecast: Forecast | None = None
    unmeasured: tuple[str, ...] = ()

    def refused(self) -> list[Effect]:
        """Options that somebody set and the plan does not follow."""
        asked = self.requested.origins
        return [
            effect
            for effect in plan_effects(self.plan, self.requested)
            if not effect.in_force and effect.option in asked
        ]

    def lines(self) -> list[str]:
        """For people. The plan's own lines are those that loading logs."""
        subject, plan = self.subject, self.plan
        shape = plan.shape
        experts = f"{format_bytes(shape.total_experts * shape.blob_bytes)} of experts ({subject.expert_format})"
        model = f"{subject.name} ({subject.source}), {shape.num_layers} layers of {shape.num_experts} experts"
        context = f"{plan.request.max_context:,} of {subject.config.max_positions:,} positions"
        chunks = f"prompts in chunks of {plan.request.chunk_rows:,}"
        lines = [
            f"model: {model}, {shape.top_k} a token; {experts}, {format_bytes(shape.dense_bytes)} dense",
            *plan.lines(),
            f"  context {context}, {chunks}; RAM by {self.ram_rule}",
        ]
        lines += [f"  refused: {effect.option}: {effect.why}" for effect in self.refused()]
        if self.plan_only:
            lines.append(f"  {PLAN_ONLY}")
        elif plan.device.kind == "cuda":
            lines.append("expected speed: not forecast for a card; 'strata bench' measures it")
        elif self.forecast is not None:
            lines += self.forecast.lines()
        elif self.unmeasured:
            lacking = " and ".join(self.unmeasured)
            lines.append(f"expected speed: {lacking} were not measured yet; {self._measuring(True)} adds them")
        else:
            threads = count_of(threads_asked(self.requested), "thread")
            what = f"this machine was not measured yet with {threads}"
            lines.append(f"expected speed: {what}; {self._measuring(False)} does it in seconds")
        return lines

    def _measuring(self, of_model: bool) -> str:
        """The command to type; what it measures holds for as many threads."""
        asked = self.requested
        words = ["strata", "plan"]
        if of_model and asked.model is not None:
            words.append(asked.model)
        if asked.origin("threads") == "command line":
            words += ["--threads", str(asked.threads)]
        return f"'{shlex.join([*words, '--measure'])}'"

    def as_json(self) -> dict[str, Any]:
        """The same as plain data; bytes are whole numbers."""
        plan, shape = self.plan, self.plan.shape
        return {
            "model": self.subject.name,
            "source": self.subject.source,
            "layers": shape.num_layers,
            "experts_per_layer": shape.num_experts,
            "experts_per_token": shape.top_k,
            "expert_format": self.subject.expert_format,
            "expert_bytes": shape.blob_bytes,
            "device": plan.device.kind,
            "plan_only": self.plan_only,
            "vram_bytes": plan.device.free_bytes,
            "ram_bytes": plan.request.ram_bytes,
            "ram_rule": self.ram_rule,
            "mode": plan.mode,
            "mode_reason": plan.mode_reason,
            "vram": dict(plan.vram),
            "ram": dict(plan.ram),
            "slots": plan.num_slots,
            "spare_slots": plan.num_spares,
            "ring_slots": plan.ring_slots,
            "ring_borrowed": plan.ring_borrowed,
            "experts_in_vram": plan.num_slots,
            "experts_in_ram": plan.num_ram_experts,
            "experts_in_all": shape.total_experts,
            "context": plan.request.max_context,
            "chunk_rows": plan.request.chunk_rows,
            "messages": list(plan.messages),
            "refused": {effect.option: effect.why for effect in self.refused()},
            "expected": None if self.forecast is None else self.forecast.as_json(),
        }


def plan_subject(subject: PlanSubject, requested: Requested, machine: Machine) -> ResolvedPlan:
    """Every byte, as loading would take it. Raises ``MemoryPlanError`` or ``ConfigError``."""
    room = plan_room(requested, machine)
    context = choose_context(requested, subject.config.max_positions)
    request = memory_request(requested, machine, context, choose_chunk_rows(requested))
    if room.kind == "cuda":
        request = request_of_card(request, requested, subject.shape, room)
    return planner.plan(subject.shape, request, room)


def planned_effects(requested: Requested, machine: Machine) -> list[Effect]:
    """For ``strata plan --show-config``."""
    plan = plan_subject(find_subject(requested.model, kv_format(requested)), requested, machine)
    return plan_effects(plan, requested)


def plan_room(requested: Requested, machine: Machine) -> DeviceRoom:
    """The device to plan for: RAM, the card that ``auto`` would take, or with ``--device cuda[:i]`` a card.

    A card named so is the one found here, or with ``--vram-gib`` one of that size, wherever it is. Of a card here the
    free memory is what it has before a program has opened it.
    """
    is_named = requested.device.startswith("cuda")
    if not is_named and choose_card(requested, machine) is None:
        return device_room(requested)
    index, cap = card_index(requested), None if requested.vram_gib is None else int(requested.vram_gib * GIB)
    if index < len(machine.gpus):
        free = machine.gpus[index].memory_free
        is_capped = cap is not None and (is_named or cap < free)
        room = cap if cap is not None and is_capped else free
        return DeviceRoom("cuda", room, pin_rooms=machine.pin_rooms, is_capped=is_capped)
    if cap is None:
        raise ConfigError(
            f"--device {requested.device}: {len(machine.gpus)} NVIDIA cards were found here",
            "--vram-gib N plans for a card that is not in this machine",
        )
    return DeviceRoom("cuda", cap, is_capped=True)


def is_usable(requested: Requested, machine: Machine) -> bool:
    """Whether the card that the request means is here and can be used."""
    try:
        return choose_card(requested, machine) is not None
    except ConfigError:
        return False


def report(requested: Requested, machine: Machine, rates: Rates | None) -> PlanReport:
    """The plan of the model asked for, with a forecast where the machine was measured and the CPU computes.

    Raises ``MemoryPlanError`` for what does not fit, ``CheckpointError`` for what is no model.
    """
    subject = find_subject(requested.model, kv_format(requested))
    plan = plan_subject(subject, requested, machine)
    usable = None if plan.device.kind == "cuda" else rates
    expected = None if usable is None else forecast(subject, plan, usable)
    lacking = () if usable is None else tuple(unmeasured(usable, subject))
    plan_only = plan.device.kind == "cuda" and not is_usable(requested, machine)
    return PlanReport(subject, plan, requested, machine.ram_rule, plan_only, expected, lacking)
