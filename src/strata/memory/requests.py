"""What the planner is told: a model's sizes, what the user asked for, and the room on a device. Plain numbers.

Lives apart from ``planner.py`` so that a configuration, a test or ``strata plan`` can name these without the
arithmetic. It must not read the environment or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "DeviceRoom",
    "MemoryRequest",
    "ModelShape",
    "PinRequest",
    "RamMode",
    "pin_arena",
    "pin_complement",
]

RamMode = Literal["arena", "resident", "budget", "mapped"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model, bytes where not a count. ``host_bytes``: what it keeps in RAM beside the experts.

    ``draft_layers``: so many of the last layers are a draft's, whose experts never cost the model's own their place.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    blob_bytes: int
    hidden: int
    dense_bytes: int
    state_bytes: int = 0  # recurrent state of one sequence
    kv_bytes_per_token: int = 0
    prompt_bytes_per_row: int = 0  # buffers of a prompt pass for each of its rows; 0: sixteen FP32 hidden vectors
    round_bytes: int = 0  # recorded rounds of a card beside the state, at no position; 0: not known
    round_bytes_per_token: int = 0  # and for each position of the context
    chunk_bytes_per_row: int = 0  # of a card's prompt chunk, for each of its rows
    row_flop: int = 0  # of a prompt's row, attention left out; an estimate from stored sizes
    frame_bytes: int = 0  # of a card's prompt pass at no position
    frame_bytes_per_token: int = 0  # and for each position of the context
    mailbox_bytes: int = 0  # page-locked RAM that a card's rounds share with the host
    draft_bytes: int = 0
    draft_layers: int = 0
    host_bytes: int = 0

    @property
    def total_experts(self) -> int:
        return self.num_layers * self.num_experts


@dataclass(frozen=True)
class DeviceRoom:
    """A device as the planner sees it. ``free_bytes`` None: a device made of RAM with no cap of its own.

    ``pin_rooms``: for each device the bytes that its driver still lets be page-locked without slowing down (the
    adapter's shared-memory budget less what is used of it); empty where the system has no such segment.
    """

    kind: Literal["cpu", "cuda"]
    free_bytes: int | None
    pins_charge_device: bool = False
    pin_rooms: tuple[int, ...] = ()
    is_capped: bool = False  # free_bytes is --vram-gib, not what the card has: hints say so


@dataclass(frozen=True)
class PinRequest:
    """How much to page-lock. ``auto``: until refused, below the adapter's budget; ``all``: until refused."""

    rule: Literal["auto", "all", "limit", "none"] = "auto"
    limit_bytes: int = 0  # of rule 'limit'
    margin_bytes: int = 4 << 30  # of rule 'auto', left of the adapter's budget
    by_need: bool = False  # only ranges that are not expected in VRAM
    partial: bool = False  # only the hottest prefix of a RAM budget
    refuse_one_allocation: bool = False  # take path 1 as refused
    prefer_slices: bool | None = False  # path 2 before path 1; None: for a large copy on a card
    huge_pages: bool = True  # path 2 asks for huge pages before it touches them
    touch_threads: int | None = None  # threads that touch path 2's pages before they are registered; None: by size


def pin_complement(value: float | Literal["auto", "all"]) -> PinRequest:
    """``STRATA_COMPLEMENT_PIN_GIB``: until refused below the budget, until refused, N GiB, or 0 for path 3."""
    if isinstance(value, str):
        return PinRequest(rule=value)
    return PinRequest(rule="limit", limit_bytes=int(value * (1 << 30))) if value else PinRequest(rule="none")


def pin_arena(value: float | Literal["auto", "none"]) -> PinRequest:
    """``STRATA_ARENA_PIN_GIB``: the budget's rule, nothing, N GiB, or 0 for the whole arena."""
    if isinstance(value, str):
        return PinRequest(rule=value)
    return PinRequest(rule="limit", limit_bytes=int(value * (1 << 30))) if value else PinRequest(rule="all")


@dataclass(frozen=True)
class MemoryRequest:
    """What the user asked for, as numbers. ``ram_bytes`` is what may be taken in all, before the headroom."""

    ram_bytes: int
    mode: RamMode = "arena"
    budget_bytes: int | None = None  # of mode 'budget'
    expert_cache: int | None = None  # slots; None: as many as fit
    vram_reserve_bytes: int = 700 << 20
    headroom_bytes: int = 4 << 30
    headroom_given: bool = False  # by the user: kept below --ram-gib too
    ram_given: bool = False  # ram_bytes is --ram-gib, not what the system says: hints say so
    max_context: int = 4096
    num_sequences: int = 1
    chunk_rows: int = 8192
    pass_rows: int = 8192
    as_windows: bool = False  # rounds are recorded, and prompts run as decode windows or, with ``in_chunks``, in chunks
    in_chunks: bool = False  # on a card's tensor cores
    prefill_borrow: bool = True
    ring_slots: int | None = None  # STRATA_PREFILL_RING
    fused_kernels: bool = False
    stager_threads: int | None = None  # STRATA_STAGER_THREADS
    measured_threads: int | None = None  # of the stager, where this machine was measured
    stager_buffers: int | None = None  # STRATA_STAGER_RING
    stage_resident: bool | None = None  # STRATA_STAGE_RESIDENT: True the new sizing, False the old one
    adapt_every: int = 0  # rounds between adaptations of the cache; 0: never
    adapt_swaps: int = 4  # experts exchanged in one adaptation at most, each through a spare slot of its own
    prefill_cpu_share: float = 0.0  # STRATA_PREFILL_CPU_SHARE: of a prompt's experts outside VRAM, the rarest
    num_cpus: int = 1
    pin: PinRequest = PinRequest()
    pin_below: PinRequest | None = None  # of the modes below the arena; None: the same
