"""From what was requested and what the machine has to the numbers that the planner takes.

Lives in ``engine`` because it is the one place where the configuration, the machine and a model's sizes meet;
the arithmetic itself is ``memory.planner``'s. It allocates nothing.
"""

from __future__ import annotations

from dataclasses import replace

from strata.config import BY_NAME, Requested
from strata.engine.rates import kept_rates
from strata.errors import ConfigError, MemoryPlanError
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.prompt.frame import BLOCK_ROWS, EDGE_ROWS, FRAME_ROWS, SHORT_ROWS
from strata.memory.planner import GIB, LEAST_RING, MIB, expert_stride, fixed_bytes, lent_slots, prompt_bytes
from strata.memory.probe import Machine
from strata.memory.requests import DeviceRoom, MemoryRequest, ModelShape, PinRequest, pin_arena, pin_complement
from strata.memory.stager_sizing import RING_SLOTS
from strata.option_values import Prefill

__all__ = [
    "card_chunk_rows",
    "choose_chunk_rows",
    "choose_context",
    "device_room",
    "headroom_bytes",
    "memory_request",
    "request_of_card",
    "request_of_windows",
]

CPU_CHUNK_ROWS = 512  # on the CPU a larger chunk saves no copies: experts are computed where they lie
HEADROOM_DIVISOR = 4  # free RAM that nobody asked to keep is at most this part of what may be taken
CHUNK_SHARE = 6  # part of what is left for experts that reserved rows of an 'auto' chunk may take
MOST_ROWS = 16384  # of an 'auto' chunk: on an H200 computing takes longer than the link there, more gain nothing
RESIDENT_ROWS = 8192  # of a chunk that streams nothing: more save nothing
FLOP_PER_BYTE = 7400  # of a prompt's rows while a byte of an expert crosses the link, as measured on an H200
AUTO_CONTEXT = 8192  # what 'auto' takes of a longer model: KV for more is planned only when asked for


def choose_context(requested: Requested, trained: int) -> int:
    """Positions of a session: asked for, or the model's own up to ``AUTO_CONTEXT``."""
    if requested.max_context == "auto":
        return min(trained, AUTO_CONTEXT)
    if requested.max_context > trained:
        raise ConfigError(
            f"--max-context {requested.max_context:,} is more than the {trained:,} positions of the model",
            f"use --max-context {trained}",
        )
    return int(requested.max_context)


def choose_chunk_rows(requested: Requested) -> int:
    """Rows of a chunk: exactly what was asked for, or what suits the CPU within the bound of 'auto'.

    A function of the option alone, never of free memory or of the prompt.
    """
    return min(requested.prefill.rows, CPU_CHUNK_ROWS) if requested.prefill.is_auto else requested.prefill.rows


def device_room(requested: Requested) -> DeviceRoom:
    """RAM as a device: without a cap, or capped by ``--vram-gib`` so that tiers can be tried with no card."""
    free = None if requested.vram_gib is None else int(requested.vram_gib * GIB)
    return DeviceRoom("cpu", free)


def headroom_bytes(requested: Requested, ram_available: int) -> int:
    """Free RAM to leave: what was asked for, nothing below ``--ram-gib``, else 4 GiB or a quarter of what is free.

    A fixed 4 GiB would refuse a model of a few MiB on a small machine; ``--ram-gib`` already says what may be used.
    """
    asked = int(requested.resident_headroom_gib * GIB)
    if headroom_given(requested):
        return asked
    return 0 if requested.ram_gib is not None else min(asked, ram_available // HEADROOM_DIVISOR)


def headroom_given(requested: Requested) -> bool:
    default = BY_NAME["resident_headroom_gib"].default
    return requested.origin("resident_headroom_gib") != "default" or requested.resident_headroom_gib != default


def memory_request(requested: Requested, machine: Machine, max_context: int, chunk_rows: int) -> MemoryRequest:
    """What the user asked for, and what was measured here, as the planner's numbers."""

    def number(value: int | str) -> int | None:
        return None if isinstance(value, str) else value

    budget, rates = requested.resident_budget_gib, kept_rates(requested)
    if machine.ram_available <= 0:
        raise MemoryPlanError("no free RAM is left", "close other programs or give --ram-gib")
    return MemoryRequest(
        ram_bytes=machine.ram_available,
        mode=requested.ram_mode,
        budget_bytes=None if budget is None else int(budget * GIB),
        expert_cache=number(requested.expert_cache),
        vram_reserve_bytes=requested.vram_reserve_mib * MIB,
        headroom_bytes=headroom_bytes(requested, machine.ram_available),
        headroom_given=headroom_given(requested),
        ram_given=requested.ram_gib is not None,
        max_context=max_context,
        chunk_rows=chunk_rows,
        pass_rows=min(chunk_rows, 8192),
        prefill_borrow=requested.prefill_borrow,
        ring_slots=number(requested.prefill_ring),
        stager_threads=number(requested.stager_threads),
        measured_threads=None if rates is None else rates.bandwidths.stager_threads,
        stager_buffers=number(requested.stager_ring),
        stage_resident=None if isinstance(requested.stage_resident, str) else requested.stage_resident,
        prefill_cpu_share=0.0 if isinstance(requested.prefill_cpu_share, str) else requested.prefill_cpu_share,
        adapt_every=requested.adapt_every,
        adapt_swaps=requested.adapt_swaps,
        num_cpus=machine.num_cpus,
        pin=pin_request(requested, pin_arena(requested.arena_pin_gib)),
        pin_below=pin_request(requested, pin_complement(requested.complement_pin_gib)),
    )


def request_of_windows(request: MemoryRequest) -> MemoryRequest:
    """For a card on which prompts run as decode windows: no ring, and the buffers of recorded rounds."""
    return replace(request, pass_rows=MAX_WINDOW, ring_slots=0, as_windows=True)


def request_of_card(request: MemoryRequest, requested: Requested, shape: ModelShape, room: DeviceRoom) -> MemoryRequest:
    """For a card on which prompts run in chunks: of what was asked for, ended with whole blocks of the delta rule
    (0133), or of ``card_chunk_rows``. Chunks that are no longer than what is read as windows make all of a prompt
    windows."""
    prefill = requested.prefill
    if not prefill.is_auto and prefill.rows <= SHORT_ROWS:
        return request_of_windows(replace(request, chunk_rows=prefill.rows))
    asked = -(-prefill.rows // BLOCK_ROWS) * BLOCK_ROWS
    request = replace(request, chunk_rows=asked, pass_rows=MAX_WINDOW, as_windows=True, in_chunks=True)
    if not prefill.is_auto or room.free_bytes is None:
        return request
    most = request.max_context if prefill == Prefill() else min(prefill.rows, request.max_context)
    return replace(request, chunk_rows=card_chunk_rows(shape, request, room.free_bytes, most))


def card_chunk_rows(shape: ModelShape, request: MemoryRequest, free_bytes: int, most: int) -> int:
    """Rows of an 'auto' chunk on a card with ``free_bytes`` of VRAM: about half more than those whose compute covers
    the link, so that a prompt that is a little longer stays one chunk; fewer where their buffers do not fit. No row's
    bits depend on it (decision record 0131). Whole frames, above ``most`` by less than one."""
    stride, request = expert_stride(shape.blob_bytes), replace(request, chunk_rows=0)
    beside = fixed_bytes(shape, request) - prompt_bytes(shape, 0, request.max_context)
    room = free_bytes - beside - request.vram_reserve_bytes
    wanted = shape.total_experts if request.expert_cache is None else min(shape.total_experts, request.expert_cache)
    largest = _whole_frames(min(most, MOST_ROWS))

    def buffers(rows: int) -> int:
        return prompt_bytes(shape, min(rows, request.max_context), request.max_context)

    plain = min(largest, RESIDENT_ROWS)
    if room >= (wanted + request.adapt_swaps) * stride + buffers(plain):  # reserved: nothing of the cache is lost
        reserved = [rows for rows in _frames_up_to(largest) if wanted * stride + buffers(rows) <= room]
        return min(max(reserved, default=plain), _covering(shape, shape.total_experts - wanted))
    slots = min(wanted, max(0, room) // stride) - request.adapt_swaps
    if not request.prefill_borrow or slots - lent_slots(buffers(EDGE_ROWS), stride) < LEAST_RING:
        left = max(0, room - buffers(0)) // CHUNK_SHARE // max(1, shape.chunk_bytes_per_row)
        return max([EDGE_ROWS, *(rows for rows in _frames_up_to(min(largest, plain)) if rows <= left)])
    fitting: list[int] = []
    for ring in (RING_SLOTS, LEAST_RING):
        fitting = [
            rows for rows in (EDGE_ROWS, 2 * EDGE_ROWS, *_frames_up_to(largest))
            if slots - lent_slots(buffers(rows), stride) >= ring
        ]  # fmt: skip
        if fitting:
            break
    best: int = fitting[-1]
    for rows in fitting:
        outside = shape.total_experts - slots + ring + lent_slots(buffers(rows), stride)
        if rows >= _covering(shape, outside):
            best = rows
            break
    return best


def _covering(shape: ModelShape, outside: int) -> int:
    """Rows of a chunk for ``outside`` experts that are streamed: half more than those that cover the link."""
    return max(
        RESIDENT_ROWS, _whole_frames(outside * shape.blob_bytes * FLOP_PER_BYTE * 3 // 2 // max(1, shape.row_flop))
    )


def _whole_frames(rows: int) -> int:
    return -(-rows // FRAME_ROWS) * FRAME_ROWS


def _frames_up_to(rows: int) -> range:
    return range(FRAME_ROWS, rows + 1, FRAME_ROWS)


def pin_request(requested: Requested, rule: PinRequest) -> PinRequest:
    """How much to page-lock: ``rule`` is that of the arena or of the copies below it, the rest is common to both."""
    return replace(
        rule,
        margin_bytes=int(requested.pin_margin_gib * GIB),
        by_need=requested.pin_by_need,
        partial=requested.partial_pin,
        refuse_one_allocation=requested.test_complement_refuse,
        prefer_slices=None if isinstance(requested.prefer_slices, str) else requested.prefer_slices,
    )
