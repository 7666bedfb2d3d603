"""What became of each option: in force, or refused and why. For ``--show-config`` and ``/v1/status``.

Lives in ``engine`` because only a plan can tell. It allocates nothing: the model's header is read, no weight is.
"""

from __future__ import annotations

from strata.config import Requested
from strata.config_sources import Effect
from strata.engine.models import open_model
from strata.engine.runtime import make_plan, probe
from strata.memory.planner import ResolvedPlan, format_bytes

__all__ = ["effects_of", "plan_effects"]


def effects_of(requested: Requested) -> list[Effect]:
    """Plans the run that was asked for, without running it. Raises what loading would raise."""
    model = open_model(requested.model)
    try:
        return plan_effects(make_plan(model, requested, probe(requested)))
    finally:
        model.close()


def plan_effects(plan: ResolvedPlan) -> list[Effect]:
    """What became of each option that a plan can overrule, for ``--show-config`` and ``/v1/status``."""
    found: list[Effect] = []
    asked = {"resident": "resident_experts", "budget": "resident_budget_gib", "mapped": "mmap_experts"}
    if plan.request.mode in asked:
        in_force = plan.mode == plan.request.mode
        found.append(Effect(asked[plan.request.mode], in_force, f"RAM mode {plan.mode}: {plan.mode_reason}"))
    slots = f"{plan.num_slots:,} slots of {format_bytes(plan.stride)}"
    found.append(Effect("expert_cache", True, slots))
    if plan.device.kind == "cpu":
        why = "no CUDA device is in use"
        found.append(Effect("vram_reserve_mib", False, why))
        found.append(Effect("pcie_frac", False, f"{why}: the CPU computes every expert where it lies"))
    if plan.num_slots in (0, plan.shape.total_experts):
        found.append(Effect("adapt_every", False, "no expert can be exchanged: the cache holds all of them or none"))
    return found
