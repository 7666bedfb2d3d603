"""What became of each option: in force, or refused and why. For ``--show-config`` and ``/v1/status``.

Lives in ``engine`` because only a plan can tell. It allocates nothing: the model's header is read, no weight is.
"""

from __future__ import annotations

from strata.config import Requested
from strata.config_sources import Effect
from strata.engine.models import open_model
from strata.engine.rates import threads_asked
from strata.engine.runtime import WAITING_THREADS, make_plan, probe
from strata.memory.planner import ResolvedPlan, format_bytes
from strata.words import count_of

__all__ = ["effects_of", "plan_effects"]

WINDOWS = "this card has no BF16 tensor cores: prompts run as decode windows and stream nothing"
NO_CARD = "no CUDA device is in use"
PIN_OPTIONS = (
    "complement_pin_gib",
    "arena_pin_gib",
    "pin_margin_gib",
    "pin_by_need",
    "partial_pin",
    "prefer_slices",
    "test_complement_refuse",
)


def effects_of(requested: Requested) -> list[Effect]:
    """Plans the run that was asked for, without running it. Raises what loading would raise."""
    model = open_model(requested.model)
    try:
        return plan_effects(make_plan(model, requested, probe(requested)), requested)
    finally:
        model.close()


def plan_effects(plan: ResolvedPlan, requested: Requested) -> list[Effect]:
    """What became of each option that a plan can overrule or that left the number to it."""
    return [
        *_machine_effects(plan, requested),
        *_memory_effects(plan, requested),
        *_pin_effects(plan),
        *_sharing_effects(plan, requested),
        *_adaptation_effects(plan),
    ]


def _machine_effects(plan: ResolvedPlan, requested: Requested) -> list[Effect]:
    request = plan.request
    busy = WAITING_THREADS if plan.device.kind == "cuda" else 0
    threads = threads_asked(requested, busy)
    return [
        Effect("threads", True, count_of(threads, "thread")),
        Effect("max_context", True, count_of(request.max_context, "position")),
        *_prompt_effects(plan),
    ]


def _prompt_effects(plan: ResolvedPlan) -> list[Effect]:
    request = plan.request
    if request.as_windows and not request.in_chunks:
        return [Effect(name, False, WINDOWS) for name in ("prefill", "prefill_borrow", "prefill_ring")]
    rows = count_of(min(request.chunk_rows, request.max_context), "row")
    shorter = ", all that the context holds" if request.chunk_rows > request.max_context else ""
    found = [Effect("prefill", True, f"chunks of up to {rows}{shorter}")]
    if request.in_chunks and plan.num_slots == 0 and plan.ring_slots:
        reserved = f"the cache has no slot to lend: {count_of(plan.ring_slots, 'slot')} are reserved"
        found.append(Effect("prefill_borrow", False, reserved))
    return found


def _memory_effects(plan: ResolvedPlan, requested: Requested) -> list[Effect]:
    request, device = plan.request, plan.device
    found: list[Effect] = []
    if device.free_bytes is None:
        found.append(Effect("vram_gib", True, "no device memory: experts are computed in RAM where they lie"))
    else:
        stands_in = "RAM stands in for device memory, " if device.kind == "cpu" else ""
        used = f"{format_bytes(plan.vram_bytes)} of {format_bytes(device.free_bytes)} planned"
        found.append(Effect("vram_gib", True, stands_in + used))
    ram = f"{format_bytes(request.ram_bytes)} may be used"
    found.append(Effect("ram_gib", True, ram if request.ram_given else f"{ram}: what the system says is free"))
    if request.headroom_bytes == 0 and requested.resident_headroom_gib > 0:
        found.append(Effect("resident_headroom_gib", False, "--ram-gib says what may be used"))
    else:
        found.append(Effect("resident_headroom_gib", True, f"{format_bytes(request.headroom_bytes)} stay free"))
    asked = {"resident": "resident_experts", "budget": "resident_budget_gib", "mapped": "mmap_experts"}
    if request.mode in asked:
        why = f"RAM mode {plan.mode}: {plan.mode_reason}"
        found.append(Effect(asked[request.mode], plan.mode == request.mode, why))
    slots = f"{count_of(plan.num_slots, 'slot')} of {format_bytes(plan.stride)}"
    if request.expert_cache is not None and request.expert_cache > plan.num_slots:
        slots += f", cut from {request.expert_cache:,}: the model has no more experts"
    found.append(Effect("expert_cache", True, slots))
    if device.kind == "cpu":
        found.append(Effect("vram_reserve_mib", False, NO_CARD))
    return found


def _sharing_effects(plan: ResolvedPlan, requested: Requested) -> list[Effect]:
    """Who computes what the device does not hold: the link's share of rounds, the CPU's of prompts."""
    iq = "all threads compute experts of every format from one row on, whatever this says"
    found = [_cpu_share_effect(plan, requested), Effect("iq_mt_min", True, iq)]
    if plan.device.kind == "cpu":
        why = f"{NO_CARD}: the CPU computes every expert where it lies"
        return [*found, *(Effect(name, False, why) for name in ("pcie_frac", "pcie_balance", "mailbox"))]
    counted = "all misses of a layer count" if requested.pcie_balance else "a fixed share of the page-locked misses"
    fraction = requested.pcie_frac
    by_rates = "auto: the card reads the link's part of what link and RAM give together, measured while loading"
    reads = by_rates if isinstance(fraction, str) else f"the card reads {100 * fraction:g} %"
    is_all_held = plan.num_slots >= plan.shape.total_experts
    if is_all_held:
        reads = counted = "every expert has a slot: nothing is read over the link"
    handed = "the host hands over the CPU's part of each layer between two graphs"
    mailbox = handed if requested.mailbox == "off" else "tested when the model is loaded"
    return [
        *found,
        Effect("pcie_frac", not is_all_held, reads),
        Effect("pcie_balance", not is_all_held, counted),
        Effect("mailbox", True, mailbox),
    ]


def _cpu_share_effect(plan: ResolvedPlan, requested: Requested) -> Effect:
    name, share = "prefill_cpu_share", plan.request.prefill_cpu_share
    if plan.device.kind == "cuda":
        return Effect(name, False, "the card computes every expert of a prompt that is read in chunks")
    if not plan.ring_slots:
        some = "the device holds every expert" if plan.num_slots else "the CPU computes every expert where it lies"
        return Effect(name, False, f"prompts stream nothing: {some}")
    if not plan.num_ram_experts and plan.mode != "mapped":
        return Effect(name, False, f"RAM mode {plan.mode}: RAM holds no expert that the CPU could compute in place")
    if not share:
        left = "auto: " if isinstance(requested.prefill_cpu_share, str) else ""
        return Effect(name, True, f"{left}the device computes every expert of a prompt")
    rarest = f"the rarest {100 * share:g} % of a prompt's experts outside the device"
    return Effect(name, True, f"the CPU computes {rarest}, where they lie in RAM")


def _pin_effects(plan: ResolvedPlan) -> list[Effect]:
    """Page-locking: nothing to lock, nobody to lock it for, or the variable of another mode."""
    if plan.mode == "mapped" or plan.num_ram_experts == 0:
        why = f"RAM mode {plan.mode}: RAM holds no expert of its own to page-lock"
        return [Effect(name, False, why) for name in PIN_OPTIONS]
    if plan.device.kind == "cpu" and not plan.num_device_slots:
        why = "nothing is page-locked: there is no device that could read it"
        return [Effect(name, False, why) for name in PIN_OPTIONS]
    arena, pin = plan.mode == "arena", plan.request.pin
    other, counts = ("complement", "ARENA") if arena else ("arena", "COMPLEMENT")
    found = [Effect(f"{other}_pin_gib", False, f"RAM mode {plan.mode}: STRATA_{counts}_PIN_GIB counts")]
    if not plan.device.pin_rooms:
        found.append(Effect("pin_margin_gib", False, "this system sets no shared-memory budget"))
    elif pin.rule != "auto":
        found.append(Effect("pin_margin_gib", False, f"STRATA_{counts}_PIN_GIB is not auto"))
    if pin.rule == "none":
        found.append(Effect("prefer_slices", False, f"STRATA_{counts}_PIN_GIB says to page-lock nothing"))
    if plan.mode != "budget":
        found.append(Effect("partial_pin", False, f"RAM mode {plan.mode}: only a RAM budget has a hottest prefix"))
    return found


def _adaptation_effects(plan: ResolvedPlan) -> list[Effect]:
    """``--adapt-every`` and ``--adapt-swaps`` act together or not at all."""
    request = plan.request
    if plan.num_slots in (0, plan.shape.total_experts):
        why = "no expert can be exchanged: the cache holds all of them or none"
        return [Effect("adapt_every", False, why), Effect("adapt_swaps", False, why)]
    if request.adapt_every == 0:
        why = "--adapt-every 0 keeps experts where they are"
        return [Effect("adapt_every", True, why), Effect("adapt_swaps", False, why)]
    if request.adapt_swaps == 0:
        why = "--adapt-swaps 0 keeps experts where they are"
        return [Effect("adapt_every", False, why), Effect("adapt_swaps", True, why)]
    if plan.num_spares == 0:
        why = "the device has no room for a spare slot"
        return [Effect("adapt_every", False, why), Effect("adapt_swaps", False, why)]
    why = f"up to {count_of(plan.num_spares, 'swap')} every {count_of(request.adapt_every, 'round')}"
    cut = "" if plan.num_spares == request.adapt_swaps else ": the slots leave room for no more"
    return [Effect("adapt_every", True, why), Effect("adapt_swaps", True, why + cut)]
