"""Decides every byte of VRAM and RAM before anything is taken; pure arithmetic over plain numbers.

Lives in ``memory`` because what the machine has and what a model needs meet here. ``plan`` turns a model's
shape, what was asked for and the room there is into one frozen ``ResolvedPlan``, or refuses with the bytes that
are short and the option that helps. It must not allocate, and knows of experts only their number and size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.errors import MemoryPlanError
from strata.kernels.cuda.prompt.frame import EDGE_ROWS, SHORT_ROWS
from strata.memory.requests import DeviceRoom, MemoryRequest, ModelShape, RamMode
from strata.memory.stager_sizing import StagerSizing, size_stager
from strata.words import count_of

__all__ = [
    "GIB",
    "LEAST_RING",
    "LENT_PIECE",
    "MIB",
    "PAGE",
    "ResolvedPlan",
    "expert_stride",
    "fixed_bytes",
    "format_bytes",
    "lent_slots",
    "plan",
    "prompt_bytes",
    "whole_pages",
]

MIB = 1 << 20
GIB = 1 << 30
PAGE = 4096
MODES: tuple[RamMode, ...] = ("arena", "resident", "budget", "mapped")
BLOB_ALIGNMENT = 64  # a cache line: a vector load never leaves a blob's own lines
MAX_PAGE_PADDING = 1 / 64  # an expert is padded to whole pages while the padding is at most this share
FEWEST_ROWS, ROWS_STEP = 256, 128  # of a prompt pass that a hint may name
LENT_PIECE = 64 << 20  # device memory under slots is lent in pieces of this
PROMPT_SPARE = 8  # part of a prompt's buffers that pieces between them take: 3.82 GiB were held of 3.76 counted (h200)
LEAST_RING = 64  # slots that a card's prompts stream through where no cache lends any
TABLE_BYTES_PER_EXPERT = 64  # tier, address, alias, slot, generation, place, counts, three tensor scales


@dataclass(frozen=True)
class ResolvedPlan:
    """Every byte, decided; nothing changes it. ``vram`` and ``ram`` are pools by name, in bytes.

    A device made of RAM without a cap has no ``vram`` pools; one with a cap is charged to ``ram`` as well, as
    "device memory". ``stride`` is the distance between experts in slots and in RAM. ``messages`` go to the log.
    """

    shape: ModelShape
    request: MemoryRequest
    device: DeviceRoom
    mode: RamMode
    mode_reason: str
    stride: int
    num_slots: int
    num_spares: int
    ring_slots: int
    ring_borrowed: bool
    lent_bytes: int  # of slots, for buffers of a card's prompt; 0: its buffers are reserved
    num_ram_experts: int
    stager: StagerSizing
    vram: dict[str, int]
    ram: dict[str, int]
    direct_reads: bool  # expert reads of a running model go past the page cache
    pin_limit: int | None  # bytes of the RAM copy that may be page-locked; None: until refused
    messages: tuple[str, ...]

    @property
    def num_device_slots(self) -> int:
        """Slots of the one device allocation: cache, spares, and the ring where it is reserved for good."""
        return self.num_slots + self.num_spares + (0 if self.ring_borrowed else self.ring_slots)

    @property
    def vram_bytes(self) -> int:
        return sum(self.vram.values())

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    def lines(self) -> list[str]:
        """The plan for people: one line a pool, then the totals."""
        pools = [("VRAM", name, size) for name, size in self.vram.items() if size]
        pools += [("RAM", name, size) for name, size in self.ram.items() if size]
        room = "RAM" if self.device.free_bytes is None else format_bytes(self.device.free_bytes)
        experts = f"{self.num_slots:,} of {self.shape.total_experts:,} experts in VRAM, {self.num_ram_experts:,} in RAM"
        ring = f"ring {count_of(self.ring_slots, 'slot')} {'borrowed' if self.ring_borrowed else 'reserved'}"
        ring = ring if self.ring_slots else "no ring"
        if self.lent_bytes:
            slots = count_of(lent_slots(self.lent_bytes, self.stride), "slot")
            ring += f", buffers of a prompt {slots} borrowed"
        experts += self._pin_words()
        totals = f"VRAM {format_bytes(self.vram_bytes)} of {room}"
        totals += f", RAM {format_bytes(self.ram_bytes)} of {format_bytes(self.request.ram_bytes)}"
        return [
            f"plan: {self.shape.name}, RAM mode {self.mode} ({self.mode_reason})",
            *(f"  {kind:5}{name:16}{format_bytes(size):>12}" for kind, name, size in pools),
            f"  {experts}, {ring}",
            f"  {totals}",
            *(f"  {message}" for message in self.messages),
        ]

    def _pin_words(self) -> str:
        """How much of the copy in RAM may be page-locked, where something could read it by itself."""
        if not self.num_ram_experts or (self.device.kind == "cpu" and not self.num_device_slots):
            return ""
        if self.pin_limit == 0:
            return ", nothing page-locked"
        most = "as much as is granted" if self.pin_limit is None else f"at most {format_bytes(self.pin_limit)}"
        return f", {most} page-locked"


def format_bytes(nbytes: int) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes >= MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB"


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def expert_stride(blob_bytes: int) -> int:
    """Distance between experts in slots and RAM: whole pages unless the padding would cost more than 1/64."""
    pages = -(-blob_bytes // PAGE) * PAGE
    if pages - blob_bytes <= pages * MAX_PAGE_PADDING:
        return pages
    return -(-blob_bytes // BLOB_ALIGNMENT) * BLOB_ALIGNMENT


def plan(shape: ModelShape, request: MemoryRequest, device: DeviceRoom) -> ResolvedPlan:
    """The plan, or ``MemoryPlanError`` with the bytes short and the option that helps."""
    stride = expert_stride(shape.blob_bytes)
    if request.in_chunks and request.expert_cache == 0:  # nothing to borrow, and prompts stream all the same
        ring = min(LEAST_RING, 2 * shape.num_experts) if request.ring_slots is None else max(1, request.ring_slots)
        request = replace(request, prefill_borrow=False, ring_slots=ring)
    fixed = _fixed_pools(shape, request)
    lent_bytes = fixed.pop("prompt buffers") if _lends_buffers(shape, request, device, stride, fixed) else 0
    lent = lent_slots(lent_bytes, stride)
    num_slots, num_spares, ring = _divide_device(shape, request, device, stride, sum(fixed.values()), lent)
    borrowed = request.prefill_borrow or ring == 0
    slots = {
        "expert slots": num_slots * stride,
        "spare slots": num_spares * stride,
        "prefill ring": 0 if borrowed else ring * stride,
    }
    ram = {"model": shape.host_bytes, "tables": shape.total_experts * TABLE_BYTES_PER_EXPERT}
    staging = size_stager(request, "arena", unpinned_share=1.0).num_buffers * stride
    ram["mailbox"] = shape.mailbox_bytes if device.kind == "cuda" else 0
    if device.free_bytes is None:
        vram: dict[str, int] = {}
        ram |= fixed | slots
    else:
        vram = fixed | slots | {"reserve": request.vram_reserve_bytes if device.kind == "cuda" else 0}
        ram["device memory"] = sum(vram.values()) if device.kind == "cpu" else 0
    lendable = min(ring + lent, num_slots) if borrowed else 0
    messages: list[str] = []
    if ring and request.ring_slots is not None and ring < request.ring_slots:
        why = "the next layer's experts and this one's are all that is used"
        if ring < 2 * shape.num_experts:
            why = "the cache has no more to lend"
        messages.append(f"STRATA_PREFILL_RING: {request.ring_slots:,} slots asked, {ring:,} taken: {why}")
    beside = _Beside(sum(ram.values()), staging, num_slots, num_slots > 0 or (ring > 0 and request.in_chunks))
    mode, reason, num_ram = _choose_mode(shape, request, stride, beside, lendable, messages)
    request = _pins_of_mode(request, mode)
    ram["staging"] = beside.of(mode, num_ram == shape.total_experts) - beside.fixed
    ram["expert copy"] = num_ram * stride
    ram["headroom"] = request.headroom_bytes
    charged = sum(vram.values()) + ram["staging"] + ram["mailbox"]
    return ResolvedPlan(
        shape=shape,
        request=request,
        device=device,
        mode=mode,
        mode_reason=reason,
        stride=stride,
        num_slots=num_slots,
        num_spares=num_spares,
        ring_slots=ring,
        ring_borrowed=borrowed,
        lent_bytes=lent_bytes,
        num_ram_experts=num_ram,
        stager=size_stager(request, mode, unpinned_share=1.0),
        vram=vram,
        ram=ram,
        direct_reads=_reads_directly(shape, request, mode, num_slots, num_ram, stride, sum(ram.values())),
        pin_limit=_limit_pins(request, device, num_ram * stride, charged, messages),
        messages=tuple(messages),
    )


def _fixed_pools(shape: ModelShape, request: MemoryRequest) -> dict[str, int]:
    """What a sequence needs on the device whatever the expert cache is."""
    pools = {
        "dense weights": shape.dense_bytes,
        "state": shape.state_bytes * request.num_sequences,
        "KV": shape.kv_bytes_per_token * request.max_context * request.num_sequences,
    }
    if request.as_windows and shape.round_bytes:
        pools["round buffers"] = shape.round_bytes + shape.round_bytes_per_token * request.max_context
        if request.in_chunks:
            rows = min(request.chunk_rows, request.max_context)
            pools["prompt buffers"] = prompt_bytes(shape, rows, request.max_context)
    else:
        rows = min(request.pass_rows, request.max_context)
        pools["prompt buffers"] = rows * _buffer_row_bytes(shape)
        pools["expert results"] = rows * _result_row_bytes(shape)
    return pools | {"draft": shape.draft_bytes}


def fixed_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    """What the device holds beside experts and reserve."""
    return sum(_fixed_pools(shape, request).values())


def prompt_bytes(shape: ModelShape, chunk_rows: int, max_context: int) -> int:
    """What a chunk of so many rows takes on a card beside the experts that stream."""
    passes = shape.frame_bytes + shape.frame_bytes_per_token * max_context
    counted = chunk_rows * shape.chunk_bytes_per_row + passes
    return counted + counted // PROMPT_SPARE


def lent_slots(nbytes: int, stride: int) -> int:
    """Slots that lie, wholly or in part, in the pieces of device memory that hold ``nbytes``."""
    return -(-nbytes // LENT_PIECE) * LENT_PIECE // stride + 2 if nbytes else 0


def _lends_buffers(
    shape: ModelShape, request: MemoryRequest, device: DeviceRoom, stride: int, fixed: dict[str, int]
) -> bool:
    """Whether a card's prompts borrow their buffers from slots: the cache gains by it, and holds them and a ring."""
    if not (request.in_chunks and request.prefill_borrow) or device.free_bytes is None:
        return False
    room = device.free_bytes - sum(fixed.values()) - (request.vram_reserve_bytes if device.kind == "cuda" else 0)
    buffers = fixed["prompt buffers"]
    wanted = shape.total_experts if request.expert_cache is None else min(shape.total_experts, request.expert_cache)
    if room >= (wanted + _count_spares(request, wanted, shape.total_experts)) * stride:
        return False
    num_slots = min(wanted, (room + buffers) // stride) - request.adapt_swaps
    return num_slots - lent_slots(buffers, stride) >= LEAST_RING


def _buffer_row_bytes(shape: ModelShape) -> int:
    return shape.prompt_bytes_per_row or 16 * 4 * shape.hidden


def _result_row_bytes(shape: ModelShape) -> int:
    return shape.top_k * 4 * shape.hidden


def _prompt_row_bytes(shape: ModelShape) -> int:
    """What a prompt pass takes on the device for each of its rows."""
    return _buffer_row_bytes(shape) + _result_row_bytes(shape)


def _divide_device(
    shape: ModelShape, request: MemoryRequest, device: DeviceRoom, stride: int, fixed: int, lent: int
) -> tuple[int, int, int]:
    """(cache slots, spare slots, ring slots) under the device's room; ``lent`` slots are a prompt's buffers."""
    total = shape.total_experts
    if device.free_bytes is None:
        num_slots = min(total, request.expert_cache or 0)
        return num_slots, _count_spares(request, num_slots, total), _count_ring(shape, request, num_slots)
    reserve = request.vram_reserve_bytes if device.kind == "cuda" else 0
    room = device.free_bytes - fixed - reserve
    if room < stride:
        raise _context_error(shape, request, device, stride - room)
    fit = room // stride
    if request.expert_cache is None:
        if fit >= total:
            return total, 0, _count_ring(shape, request, total, lent)
        ring = 0 if request.prefill_borrow else min(_count_ring(shape, request, fit), max(1, fit // 2))
        spares = min(_count_spares(request, fit, total), max(0, fit - ring - 1))
        num_slots = fit - spares - ring
        return num_slots, spares, ring or _count_ring(shape, request, num_slots, lent)
    num_slots = min(total, request.expert_cache)
    spares, ring = _count_spares(request, num_slots, total), _count_ring(shape, request, num_slots, lent)
    needed = num_slots + spares + (0 if request.prefill_borrow else ring)
    if needed > fit:
        fitting = max(0, fit - (needed - num_slots))
        short = (needed - fit) * stride
        raise MemoryPlanError(
            f"{num_slots:,} expert slots of {format_bytes(stride)} are {format_bytes(short)} more than the "
            f"{format_bytes(device.free_bytes)} of VRAM hold beside {format_bytes(fixed + reserve)} of other things",
            f"use --expert-cache auto or at most {fitting:,}",
            short_bytes=short,
        )
    return num_slots, spares, ring


def _count_spares(request: MemoryRequest, num_slots: int, total: int) -> int:
    """One spare slot for each swap that may be under way; none where nothing is ever swapped."""
    if request.adapt_every == 0 or num_slots == 0 or num_slots == total:
        return 0
    return min(request.adapt_swaps, num_slots)


def _count_ring(shape: ModelShape, request: MemoryRequest, num_slots: int, lent: int = 0) -> int:
    """Slots that experts outside VRAM stream through in a prompt; 0: none is outside, or no slot exists."""
    if (num_slots == shape.total_experts and not lent) or (num_slots == 0 and request.prefill_borrow):
        return 0
    wanted = size_stager(request, "arena", unpinned_share=0.0).ring_slots
    wanted = min(wanted, 2 * shape.num_experts)  # this layer's experts and the next one's: more is never used
    return min(wanted, num_slots - lent) if request.prefill_borrow else wanted


def _context_error(shape: ModelShape, request: MemoryRequest, device: DeviceRoom, short: int) -> MemoryPlanError:
    assert device.free_bytes is not None
    kind = "VRAM" if device.kind == "cuda" else "RAM as device memory"
    message = (
        f"{format_bytes(device.free_bytes)} of {kind} are {format_bytes(short)} too few for {shape.name} with "
        f"{request.max_context:,} tokens of context and one expert slot"
    )
    per_token = shape.kv_bytes_per_token * request.num_sequences
    saved = -(-short // per_token) if per_token else request.max_context
    needed = _gib_option(device.free_bytes + short)
    if device.kind == "cpu":
        less = f", or use --max-context {request.max_context - saved}" if saved < request.max_context else ""
        return MemoryPlanError(message, f"raise --vram-gib to {needed} or leave it out{less}", short_bytes=short)
    if request.in_chunks:  # windows take no buffers of a prompt, and compute its rows as rounds do
        saved_bytes = prompt_bytes(shape, min(request.chunk_rows, request.max_context), request.max_context)
        fewer = _fewer_rows(shape, request, short)
        if saved_bytes >= short:
            return MemoryPlanError(message, f"use --prefill {fewer}", short_bytes=short)
    rows = min(request.pass_rows, request.max_context)
    fewer = (rows - -(-short // _prompt_row_bytes(shape))) // ROWS_STEP * ROWS_STEP
    if fewer >= FEWEST_ROWS:  # costs speed of prompts alone
        return MemoryPlanError(message, f"use --prefill {fewer}", short_bytes=short)
    if saved < request.max_context:
        return MemoryPlanError(message, f"use --max-context {request.max_context - saved}", short_bytes=short)
    if request.vram_reserve_bytes >= short:
        kept = (request.vram_reserve_bytes - short) // MIB
        return MemoryPlanError(message, f"use --vram-reserve-mib {kept}", short_bytes=short)
    if shape.dense_bytes > device.free_bytes:
        message += f"; its dense weights alone take {format_bytes(shape.dense_bytes)}"
    way = f"it takes --vram-gib {needed}" if device.is_capped else f"it takes {needed} GiB of free VRAM"
    return MemoryPlanError(message, f"{way} or --device cpu", short_bytes=short)


def _fewer_rows(shape: ModelShape, request: MemoryRequest, short: int) -> int:
    """Rows of a card's chunk that take ``short`` bytes less: whole frames' edges, or windows where no chunk fits."""
    rows = min(request.chunk_rows, request.max_context)
    fewer = (rows - -(-short // max(1, shape.chunk_bytes_per_row))) // EDGE_ROWS * EDGE_ROWS
    return fewer if fewer >= EDGE_ROWS else SHORT_ROWS


def _ram_error(request: MemoryRequest, other_ram: int, short: int) -> MemoryPlanError:
    message = (
        f"{format_bytes(request.ram_bytes)} of RAM are {format_bytes(short)} too few: {format_bytes(other_ram)} "
        "beside the experts"
    )
    lower = ["--max-context", "--expert-cache"]
    if request.headroom_bytes:
        message += f" and {format_bytes(request.headroom_bytes)} of headroom"
        lower.append("STRATA_RESIDENT_HEADROOM_GIB")
    kept = request.headroom_bytes if request.ram_given or request.headroom_given else 0
    wanted = _gib_option(other_ram + kept)
    way = f"raise --ram-gib to {wanted}" if request.ram_given else f"close other programs or give --ram-gib {wanted}"
    return MemoryPlanError(message, f"{way}, or lower {', '.join(lower[:-1])} or {lower[-1]}", short_bytes=short)


def _gib_option(nbytes: int) -> str:
    """The least number of two decimals that an option in GiB must have to grant ``nbytes``."""
    return f"{-(-nbytes * 100 // GIB) / 100:.2f}"


@dataclass(frozen=True)
class _Beside:
    """RAM beside the experts: ``fixed`` in every mode, ``staging`` where something moves."""

    fixed: int
    staging: int
    num_slots: int
    moves: bool

    def of(self, mode: RamMode, whole: bool) -> int:
        """``whole``: RAM holds every expert. Without slots, what lies in RAM is computed in place, mapped or not."""
        return self.fixed + (0 if not self.moves and (mode == "mapped" or whole) else self.staging)


def _choose_mode(
    shape: ModelShape, request: MemoryRequest, stride: int, beside: _Beside, lendable: int, messages: list[str]
) -> tuple[RamMode, str, int]:
    """(mode, why, experts in RAM): the mode asked for, or the next lower one that fits, said in ``messages``."""
    free = request.ram_bytes - request.headroom_bytes
    total = shape.total_experts
    complement = total - beside.num_slots
    for mode in MODES[MODES.index(request.mode) :]:
        wanted = total if mode == "arena" else complement
        if mode == "budget" and request.budget_bytes is not None:
            wanted = min(complement, request.budget_bytes // stride)
        room = free - beside.of(mode, wanted == total)
        if mode == "budget" and wanted == total and room < total * stride:
            # A part of them then; the rest is staged.
            room = free - beside.of(mode, whole=False)
        if mode == "mapped" and room < 0:
            raise _ram_error(request, free - room, -room)
        fit = max(0, room) // stride
        reason = "asked for" if mode == request.mode and mode != "arena" else "the default"
        if mode != request.mode:
            reason = f"{request.mode} does not fit"
        if mode == "arena" and wanted * stride <= room:
            return mode, reason, total
        if mode == "resident" and wanted * stride <= room:
            return mode, reason, min(total, complement + min(lendable, fit - complement))
        if mode == "budget":
            if wanted > fit and request.budget_bytes is not None:
                messages.append(
                    f"--resident-budget-gib: {format_bytes(wanted * stride)} asked, {format_bytes(fit * stride)} fit "
                    f"beside {format_bytes(request.headroom_bytes)} of headroom"
                )
            if min(wanted, fit) > 0 or (request.mode == "budget" and room >= 0):
                return mode, reason, min(wanted, fit)
        if mode == "mapped":
            return mode, reason, 0
        needed = wanted * stride
        if mode != "budget":
            messages.append(
                f"RAM mode {mode}: {format_bytes(needed)} of experts are {format_bytes(needed - room)} more than the "
                f"{format_bytes(max(0, room))} that are free beside the headroom; the next lower mode is taken"
            )
    raise AssertionError("the mapped mode always fits")


def _reads_directly(
    shape: ModelShape, request: MemoryRequest, mode: RamMode, num_slots: int, num_ram: int, stride: int, ram_bytes: int
) -> bool:
    """Whether the page cache is too small to help: it would hold less than a quarter of what only the file holds."""
    in_file = (shape.total_experts - num_slots - num_ram) * stride
    return mode == "budget" and in_file > 0 and 4 * (request.ram_bytes - ram_bytes) < in_file


def _pins_of_mode(request: MemoryRequest, mode: RamMode) -> MemoryRequest:
    """``request`` with the page-locking rule of the mode that is in force; only a budget has a hottest prefix."""
    pin = request.pin if mode == "arena" or request.pin_below is None else request.pin_below
    return replace(request, pin=replace(pin, partial=pin.partial and mode == "budget"))


def _limit_pins(
    request: MemoryRequest, device: DeviceRoom, copy_bytes: int, device_bytes: int, messages: list[str]
) -> int | None:
    """Bytes of the RAM copy that may be page-locked; None: until the driver refuses.

    ``device_bytes``: what the device holds already where page-locked bytes count as its own (with staging and mailbox).
    """
    pin = request.pin
    limits = []
    if pin.rule == "none":
        return 0
    if pin.rule == "limit":
        limits.append(pin.limit_bytes)
    if pin.rule == "auto" and device.pin_rooms:
        limits.append(max(0, min(device.pin_rooms) - pin.margin_bytes))
    if device.pins_charge_device and device.free_bytes is not None:
        limits.append(max(0, device.free_bytes - device_bytes))
    if not limits or min(limits) >= copy_bytes:
        return None
    messages.append(f"page-locking stops at {format_bytes(min(limits))} of {format_bytes(copy_bytes)}")
    return min(limits)
