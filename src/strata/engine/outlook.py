"""What this PC could run: known shapes planned on this machine, with no weights and nothing allocated.

Lives in ``engine`` because it joins shapes, the configuration and the planner.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.config import Requested
from strata.engine.planning import choose_chunk_rows, choose_context, device_room, memory_request
from strata.engine.shape import config_shape
from strata.errors import MemoryPlanError
from strata.memory import planner
from strata.memory.planner import ResolvedPlan
from strata.memory.probe import Machine
from strata.models import find
from strata.models.known_shapes import KNOWN_SHAPES

__all__ = ["Outlook", "known_outlooks"]


@dataclass(frozen=True)
class Outlook:
    """A known shape on this machine: its plan, or why there is none."""

    name: str
    experts_bytes: int
    dense_bytes: int
    plan: ResolvedPlan | None
    refusal: str = ""


def known_outlooks(requested: Requested, machine: Machine) -> list[Outlook]:
    """One outlook a known shape, in the order of their names' list."""
    found = []
    for name, raw in KNOWN_SHAPES.items():
        config = find(raw).read_config(raw)
        shape = config_shape(name, raw, "f32" if requested.kv == 32 else "bf16")
        experts = shape.total_experts * shape.blob_bytes
        try:
            context = choose_context(requested, config.max_positions)
            request = memory_request(requested, machine, context, choose_chunk_rows(requested))
            plan = planner.plan(shape, request, device_room(requested))
            found.append(Outlook(name, experts, shape.dense_bytes, plan))
        except MemoryPlanError as error:
            found.append(Outlook(name, experts, shape.dense_bytes, None, str(error)))
    return found
