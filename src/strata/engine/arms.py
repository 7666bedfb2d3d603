"""The placements that ``strata verify`` and ``strata demo`` force in turn, and what each must have done to count.

Lives in ``engine`` because an arm is a requested configuration plus a device that misbehaves on purpose; how tiers
work is ``experts``' business. Every arm names counters that must have moved: an arm whose mechanism did not occur
proves nothing and is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata.config import OPTIONS, Requested
from strata.engine.cancellation import Cancellation
from strata.engine.identity import WINDOWS, ArmResult, Script, Transcript, compare, play
from strata.engine.models import OpenModel
from strata.engine.planning import CPU_CHUNK_ROWS
from strata.engine.prompt_lengths import CHUNK, LONG_CHUNK, PAST, LengthPlan, Plays
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.errors import StrataError
from strata.experts.dispatch import WINDOW_ROWS
from strata.experts.injection import FaultInjection, Witness
from strata.experts.tiers import Tier
from strata.kernels.cpu.blocks import row_blocks
from strata.kernels.cuda.prompt.frame import SHORT_ROWS
from strata.kernels.host import HostFaults
from strata.option_values import Prefill
from strata.stats import difference

__all__ = [
    "ALL_TIERS", "DEMO", "FAST", "HOST_ALONE", "LONG_CHUNKS", "SMALL_WINDOWS", "WIDE", "Arm", "SelfTest", "all_arms",
    "demo_arms", "overruled", "run_arm", "run_arms", "script_of", "self_tests",
]  # fmt: skip

PATH_1, PATH_2, PATH_3 = (f"page_lock_path = {path}" for path in (1, 2, 3))
SOUND = HostFaults()  # a device that does nothing wrong
FAST, ALL_TIERS, SMALL_WINDOWS = "all in VRAM", "all tiers", "all tiers, small windows"
LATE = "arena, path 3, late copies, two buffers"
LONG_CHUNKS = f"all tiers, chunks of {LONG_CHUNK:,}"
# The arms of the wide model unless everything is asked for: what is fast, what is not, and prompts read in groups so
# small that other kernels read them.
WIDE = (FAST, ALL_TIERS, SMALL_WINDOWS)


@dataclass(frozen=True)
class Arm:
    """One placement. ``options`` are fields of ``Requested``; ``must`` are conditions on the run's counters, each a
    counter that has to have moved (``hits``) or a comparison (``page_lock_path = 2``, ``alias_picks < hits``).
    ``plays`` says at which lengths its mechanism can differ; ``reading`` how prompts are read where not in chunks
    (``play``)."""

    name: str
    options: Mapping[str, object]
    must: tuple[str, ...]
    faults: HostFaults = SOUND
    plays: Plays = "classes"
    reading: tuple[int, ...] = ()


@dataclass(frozen=True)
class SelfTest:
    """A fault planted in one arm; the comparison must then name that arm as different."""

    name: str
    arm: Arm
    injection: Callable[[], FaultInjection]


@dataclass(frozen=True)
class _Sizes:
    """What arms are made from: counts of the model, and the RAM copy's bytes at a quarter of the slots."""

    total: int
    layer: int
    top_k: int
    blob_bytes: int

    @classmethod
    def of(cls, model: OpenModel) -> _Sizes:
        config = model.config
        layout = model.reader.layout
        assert layout is not None, "the model has routed experts"
        total = len(model.reader.expert_layers) * config.num_experts
        return cls(total, config.num_experts, config.top_k, layout.blob_bytes)

    @property
    def quarter(self) -> int:
        return max(1, self.total // 4)

    @property
    def small_ring(self) -> int:
        """Fewer slots than a layer has experts, so that the ring must be gone round, and than the cache has, so that a
        prompt which borrows them still meets experts in VRAM."""
        return max(2, min(self.layer // 2, self.quarter // 2))

    @property
    def wide_ring(self) -> int:
        """As many as may be under way at once, so that more copies wait than there are staging buffers."""
        return max(4, min(self.layer // 2, self.quarter))

    def copy_bytes(self, share: float) -> int:
        """``share`` of the copy in RAM that a quarter of the slots leaves."""
        return int(share * (self.total - self.quarter) * self.blob_bytes)


# What a prompt streams; on a card short ones run as decode windows and stream nothing.
STREAMING = ("prefill", "prefill_ring", "prefill_borrow")
STREAMED = ("ring_loads", "ring_loads = 0", "direct_bytes", "staged_bytes")


def all_arms(model: OpenModel, *, on_card: bool = False, streams: bool = True) -> list[Arm]:
    """Every placement that can be forced on this machine; the first is the one the others are compared with.

    ``on_card``: rounds run on a real card. What takes a device that misbehaves is forced by options there, or left
    out, and so is the CPU's share of a streamed prompt. ``streams``: a prompt there is long enough to be streamed.
    """
    arms = _host_arms(model)
    if not on_card:
        return arms
    return [*(_card_arm(arm, streams=streams) for arm in arms if _fits_card(arm, streams=streams)), _by_hand(model)]


def _by_hand(model: OpenModel) -> Arm:
    """Without the mailbox: what a card does where its self-test fails."""
    options = {"adapt_every": 0, "expert_cache": _Sizes.of(model).quarter, "mailbox": "off"}
    return Arm("handed over by the host", options, ("hits", "misses_pinned", "handed_over"))


def _fits_card(arm: Arm, *, streams: bool) -> bool:
    only_streamed = arm.plays == "chunks" or arm.name == "ring reserved"
    return "prefill_cpu_share" not in arm.options and arm.name != LATE and (streams or not only_streamed)


def _card_arm(arm: Arm, *, streams: bool) -> Arm:
    """The arm with refusals by options in place of a device's faults, and without what only streaming does."""
    streams = streams and not arm.reading  # windows read by themselves stream nothing
    options = {name: value for name, value in arm.options.items() if streams or name not in STREAMING}
    if arm.faults.refuse_one_allocation and arm.faults.refuse_after_bytes is None:
        options["test_complement_refuse"] = True
    elif arm.faults.refuse_after_bytes is not None:
        options |= {"test_complement_refuse": True, "complement_pin_gib": arm.faults.refuse_after_bytes / 2**30}
    must = tuple(condition for condition in arm.must if streams or condition not in STREAMED)
    if "file_bytes" in must and not streams:  # read by the CPU's worker inside the round
        must = tuple(condition for condition in must if condition != "file_bytes")
    return dataclasses.replace(arm, options=options, must=must, faults=SOUND)


def _host_arms(model: OpenModel) -> list[Arm]:
    sizes = _Sizes.of(model)
    total, quarter, ring = sizes.total, sizes.quarter, {"prefill_ring": sizes.small_ring}
    some = {"expert_cache": quarter, **ring}
    slots = {"adapt_every": 0}
    long = {"prefill": Prefill(LONG_CHUNK, is_auto=False)}  # a prompt that others read in two chunks is one
    half_pinned = HostFaults(refuse_one_allocation=True, refuse_after_bytes=sizes.copy_bytes(0.7))  # whole layers
    budget_gib = sizes.copy_bytes(0.5) / 2**30
    swapping = {**some, "adapt_every": 1, "adapt_swaps": 2}
    # A third of the copy in each of page-locked RAM, pageable RAM and the file; two buffers, so each is used again.
    tiers = {**slots, **some, "resident_budget_gib": sizes.copy_bytes(0.67) / 2**30, "stager_ring": 2}
    tiers["complement_pin_gib"] = sizes.copy_bytes(0.33) / 2**30
    every_tier = ("hits", "misses_pinned", "misses_pageable", "misses_file", "file_bytes")
    return [
        Arm(FAST, {"expert_cache": total, "resident_experts": True}, ("hits",), plays="edges"),
        Arm(ALL_TIERS, tiers, (*every_tier, "ring_loads"), plays="edges"),
        Arm(SMALL_WINDOWS, tiers, every_tier, plays="tails", reading=_small_windows()),
        *(
            Arm(
                f"all tiers, chunks of {rows:,}",
                {**tiers, "prefill": Prefill(rows, is_auto=False)},
                every_tier,
                plays="chunks",
            )
            for rows in _other_chunks()
        ),
        Arm("CPU only", {"expert_cache": 0, "arena_pin_gib": "none"}, ("misses_pageable", "hits = 0")),
        Arm("slots: top-k", {**slots, "expert_cache": max(2, sizes.top_k), **ring}, ("misses_pinned", "ring_loads")),
        Arm(
            "slots: 10 %",
            {**slots, "expert_cache": max(2, total // 10), **ring},
            ("hits", "misses_pinned", "ring_loads"),
        ),
        Arm("slots: 50 %", {**slots, "expert_cache": total // 2, **ring}, ("hits", "misses_pinned", "ring_loads")),
        Arm(
            "arena, path 1", {**slots, **some, **long}, (PATH_1, "hits", "misses_pinned", "direct_bytes", "ring_loads")
        ),
        Arm(
            "arena, path 2",
            {**slots, **some},
            (PATH_2, "hits", "misses_pinned", "direct_bytes", "misses_pageable = 0"),
            HostFaults(refuse_one_allocation=True),
        ),
        Arm(
            "arena, path 3",
            {**slots, **some, **long, "arena_pin_gib": "none"},
            (PATH_3, "misses_pageable", "staged_bytes", "misses_pinned = 0"),
        ),
        Arm(
            "arena, 37 % pinned",
            {**slots, **some, "arena_pin_gib": sizes.copy_bytes(0.37) / 2**30},
            ("misses_pinned", "misses_pageable", "staged_bytes"),
        ),
        Arm(
            LATE,
            {**slots, **some, "arena_pin_gib": "none", "stager_ring": 2, "prefill_ring": sizes.wide_ring},
            (PATH_3, "misses_pageable", "staged_bytes", "buffer_waits"),
            HostFaults(copies="last_moment", late_queries=3),
        ),
        Arm("resident", {**slots, **some, "resident_experts": True}, (PATH_1, "hits", "misses_pinned", "direct_bytes")),
        Arm(
            "resident, nothing twice",
            {**slots, **some, "resident_experts": True, "prefill_borrow": False},
            ("hits", "misses_pinned", "ring_loads", f"experts_in_ram = {total - quarter}"),
        ),
        Arm(
            "resident, refused half-way",
            {**slots, **some, **long, "resident_experts": True},
            (PATH_2, "hits", "misses_pinned", "misses_pageable", "direct_bytes", "staged_bytes"),
            half_pinned,
        ),
        Arm(
            "resident, 37 % pinned",
            {**slots, **some, "resident_experts": True, "complement_pin_gib": sizes.copy_bytes(0.37) / 2**30},
            ("misses_pinned", "misses_pageable", "staged_bytes"),
        ),
        Arm(
            "budget and file",
            {**slots, **some, "resident_budget_gib": budget_gib},
            ("hits", "misses_pinned", "misses_file", "file_bytes"),
        ),
        Arm("mapped file", {**slots, **some, **long, "mmap_experts": True}, ("hits", "misses_mapped")),
        Arm(
            "a swap every round",
            {**some, "resident_experts": True, "adapt_every": 1, "adapt_swaps": 2},
            ("swaps", "hits", "misses_pinned"),
        ),
        Arm("swaps, arena", swapping, ("swaps", "swaps_pinned", "hits", "misses_pinned")),
        Arm(
            "swaps, arena, nothing pinned",
            {**swapping, "arena_pin_gib": "none"},
            ("swaps", "swaps_pageable", "hits", "misses_pageable"),
        ),
        Arm(
            "swaps, budget and file",
            {**swapping, **tiers, "adapt_every": 1},
            ("swaps", "swaps_file", "hits", "misses_file"),
        ),
        Arm(
            "swaps, mapped file", {**swapping, "mmap_experts": True}, ("swaps", "swaps_mapped", "hits", "misses_mapped")
        ),
        Arm(
            "swaps, half pinned, late copies",
            {**some, "resident_experts": True, "adapt_every": 1, "adapt_swaps": 2},
            ("swaps", "misses_pageable", "saved_bytes"),
            dataclasses.replace(half_pinned, copies="last_moment", late_queries=2),
        ),
        *(
            Arm(
                f"PCIe share {share}",
                {**slots, **some, "pcie_frac": share},
                ("misses_pinned", condition),
            )
            for share, condition in (
                (0.0, "alias_picks = 0"),
                (0.5, "alias_picks < misses_pinned"),
                (1.0, "alias_picks = misses_pinned"),
            )
        ),
        Arm(
            "PCIe share 0.5, fixed",
            {**slots, **some, "pcie_frac": 0.5, "pcie_balance": False},
            ("misses_pinned", "alias_picks < misses_pinned"),
        ),
        *(
            Arm(f"CPU share {share} of prompts", {**slots, **some, "prefill_cpu_share": share}, ("hits", condition))
            for share, condition in ((0.5, "ring_loads"), (1.0, "ring_loads = 0"))
        ),
        Arm("ring reserved", {**slots, **some, "prefill_borrow": False}, ("ring_loads", "misses_pinned")),
    ]


def _small_windows() -> tuple[int, ...]:
    """Row counts below those that are cut into panels, each once: no prompt is read by the kernels of many rows."""
    most = row_blocks()["kPackRows"] - 1
    return tuple(rows for pair in zip(range(1, most + 1), range(most, 0, -1), strict=True) for rows in pair)[:most]


def _other_chunks() -> list[int]:
    """Chunks beside those of every arm: longer ones, and what an arm without the option takes."""
    return sorted({LONG_CHUNK, CPU_CHUNK_ROWS} - {CHUNK})


# Zero at first, they tell a state rather than count.
LEVELS = ("experts_in_vram", "experts_in_ram", "experts_pinned", "page_lock_path")


# Every mode of the RAM copy and every path of page-locking.
DEMO = {
    "all in VRAM": "all experts fast (resident)",
    "arena, path 1": "a quarter of slots (arena, path 1)",
    "arena, path 3": "nothing pinned (arena, path 3)",
    "resident, refused half-way": "half pinned (resident, path 2)",
    "budget and file": "half in the file (budget)",
    "mapped file": "no copy at all (mapped)",
}


def demo_arms(model: OpenModel, prompt_rows: int, *, on_card: bool = False) -> list[Arm]:
    """The placements of ``strata demo``. A prompt short enough to run as a decode window streams nothing."""
    streams = prompt_rows > (SHORT_ROWS if on_card else WINDOW_ROWS)
    idle = () if streams else STREAMED
    return [
        dataclasses.replace(arm, name=DEMO[arm.name], must=tuple(name for name in arm.must if name not in idle))
        for arm in all_arms(model, on_card=on_card, streams=streams)
        if arm.name in DEMO
    ]


# Faults that a card is not given: what its rounds read from a file is compared anew each time, short prompts are
# windows that stage nothing, and only the host's dispatcher sums and counts rows in Python.
ORDER, DROPPED, ULP = "sums in another order in long chunks", "a row of a window dropped", "scales one ulp off"
HOST_ALONE = (f"one bit flipped in {Tier.FILE.name}", "a staging buffer reused early", ORDER, DROPPED, ULP)


def self_tests(model: OpenModel, *, on_card: bool = False) -> list[SelfTest]:
    """One bit flipped in each tier in turn, a swap's copy dropped, a staging buffer reused early; on a card without
    ``HOST_ALONE``, and page-locked experts are read by the CPU in one test and over the link in another."""
    tests = _host_self_tests(model)
    if not on_card:
        return tests
    arms = {arm.name: arm for arm in all_arms(model, on_card=True, streams=False)}
    planted = [dataclasses.replace(one, arm=arms[one.arm.name]) for one in tests if one.name not in HOST_ALONE]
    pinned = next(one for one in planted if one.arm.name == "arena, path 1")
    over_link = dataclasses.replace(pinned, name=f"{pinned.name}, link", arm=arms["PCIe share 1.0"])
    return [*planted, over_link]


def _host_self_tests(model: OpenModel) -> list[SelfTest]:
    arms = {arm.name: arm for arm in all_arms(model)}
    tiers = {
        Tier.VRAM: "slots: 50 %",
        Tier.PINNED: "arena, path 1",
        Tier.PAGEABLE: "CPU only",
        Tier.MAPPED: "mapped file",
        Tier.FILE: "budget and file",
    }
    layout = model.reader.layout
    assert layout is not None, "the model has routed experts"
    # The scale of the down matrix's first weights: a weight of gate or up may be lost in an activation's rounding.
    byte = layout.down_offset + layout.code_bytes
    tests = [
        SelfTest(
            f"one bit flipped in {tier.name}",
            arms[name],
            lambda tier=tier: FaultInjection(flip_bit_in=tier, flip_at=byte),  # type: ignore[misc]
        )
        for tier, name in tiers.items()
    ]
    wrong = {
        Tier.PINNED: "swaps, arena",
        Tier.PAGEABLE: "swaps, arena, nothing pinned",
        Tier.MAPPED: "swaps, mapped file",
        Tier.FILE: "swaps, budget and file",
    }
    tests += [
        SelfTest(
            f"a wrong expert swapped in from {tier.name}",
            arms[name],
            lambda tier=tier: FaultInjection(swap_wrong_from=tier),  # type: ignore[misc]
        )
        for tier, name in wrong.items()
    ]
    window = (row_blocks()["kTileRows"] + PAST, WINDOW_ROWS)
    met = (Tier.PAGEABLE, Tier.FILE)
    tests += [
        SelfTest("a swap's copy dropped", arms["a swap every round"], lambda: FaultInjection(drop_swap_copy=True)),
        SelfTest("a staging buffer reused early", arms[LATE], lambda: FaultInjection(reuse_buffer_early=True)),
        SelfTest(ORDER, arms[LONG_CHUNKS], lambda: FaultInjection(reorder_sums_above=CHUNK)),
        SelfTest(DROPPED, arms["CPU only"], lambda: FaultInjection(drop_row_in=window)),
        SelfTest(
            ULP, dataclasses.replace(arms[ALL_TIERS], plays="classes"), lambda: FaultInjection(nudge_scales_of=met)
        ),
        SelfTest("another id from the greedy path", arms["slots: 50 %"], lambda: FaultInjection(wrong_greedy_id=True)),
    ]
    return tests


KEPT_OPTIONS = ("ram_gib", "resident_headroom_gib")


def overruled(requested: Requested) -> list[str]:
    """What the user set and every arm sets by itself, as it is spelled."""
    return [one.spelling for one in _OWN if requested.origin(one.name) != "default"]


_OWN = [one for one in OPTIONS if one.group in ("memory", "prompt", "experts") and one.name not in KEPT_OPTIONS]


def arm_request(requested: Requested, arm: Arm, longest: int) -> Requested:
    """The user's configuration with every memory, prompt and expert option at its default, then the arm's own. Paths
    of page-locking go in their documented order, so that an arm takes the one that it is named for. ``longest``:
    positions of the longest sequence."""
    free = {one.name: one.default for one in _OWN} | {"prefer_slices": False}
    context = requested.max_context if isinstance(requested.max_context, int) else longest + max(WINDOWS)
    changed = {**free, "prefill": Prefill(CHUNK, is_auto=False), "max_context": context, **arm.options}
    return dataclasses.replace(requested, **changed)  # type: ignore[arg-type]


def run_arm(
    model: OpenModel,
    requested: Requested,
    arm: Arm,
    script: Script,
    *,
    reference: Transcript | None,
    longest: int | None = None,
    injection: FaultInjection | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ArmResult:
    """Loads the placement, plays the script, compares. A named error becomes the row's error, except the reference's,
    which is raised: without it nothing can be compared. ``longest``: positions that every arm of the table has, where
    the script alone does not say it."""
    asked = arm_request(requested, arm, max(longest or 0, script.longest))
    try:
        return _play_arm(model, asked, arm, script, reference, injection or Witness(), on_progress)
    except StrataError as error:
        if reference is None:
            raise
        return ArmResult(arm.name, None, {}, error=str(error))


class _Seen(Session):
    """A session whose greedy rounds a witness sees."""

    def __init__(self, runtime: Runtime, witness: Witness) -> None:
        super().__init__(runtime)
        self._witness, self._vocabulary = witness, runtime.vocabulary

    def greedy_round(self, ids: Sequence[int], *, cancellation: Cancellation | None = None) -> list[int]:
        return self._witness.before_answer(super().greedy_round(ids, cancellation=cancellation), self._vocabulary)


def _play_arm(
    model: OpenModel,
    asked: Requested,
    arm: Arm,
    script: Script,
    reference: Transcript | None,
    witness: Witness,
    on_progress: Callable[[str], None] | None,
) -> ArmResult:
    # An arm forces its tiers whatever this system lets a process lock.
    runtime = Runtime.open(model, asked, faults=arm.faults, injection=witness, locks=None)
    try:
        before = runtime.statistics().experts
        transcript = play(
            lambda: _Seen(runtime, witness),
            script,
            runtime.vocabulary,
            model.text.end_ids,
            reference=reference,
            reading=arm.reading,
            tokenizer=model.text.tokenizer,
            on_progress=on_progress,
        )
        after, mode = runtime.statistics().experts, runtime.plan.mode
    finally:
        runtime.close()
    counters = {name: int(value) for name, value in difference(after, before).items()}
    counters |= {name: getattr(after, name) for name in LEVELS}
    missing = [condition for condition in arm.must if not _holds(condition, counters)]
    decodes_many = any(script.tokens_after(length) == script.decode_tokens for length in script.prompt_lengths)
    if reference is not None and max(script.windows) > 1 and decodes_many:
        windows = {"accepted drafts": transcript.drafts_accepted, "rejected drafts": transcript.drafts_rejected}
        missing += [name for name, count in windows.items() if not count]
    different = transcript.answered if reference is None else compare(reference, transcript)
    return ArmResult(arm.name, transcript, counters, tuple(missing), different, mode=mode, seen=witness)


def _holds(condition: str, counters: Mapping[str, int]) -> bool:
    """Whether a condition of ``Arm.must`` is true of the run."""
    name, *rest = condition.split()
    if not rest:
        return counters[name] > 0
    operator, right = rest
    bound = int(right) if right.isdigit() else counters[right]
    return 0 < counters[name] < bound if operator == "<" else counters[name] == bound


def script_of(plan: LengthPlan, arm: Arm) -> Script:
    """What an arm reads of a plan."""
    chunk = arm.options.get("prefill")
    return plan.script_of(arm.plays, long_chunks=isinstance(chunk, Prefill) and chunk.rows > CHUNK)


def run_arms(
    model: OpenModel,
    requested: Requested,
    arms: Sequence[Arm],
    plan: LengthPlan,
    on_progress: Callable[[str, str], None] | None = None,
) -> Iterator[ArmResult]:
    """Results in order; the first arm is the reference of the others, plays what any of them plays, and its error is
    raised."""
    if not arms:
        return
    reference: Transcript | None = None
    every = Script.union(script_of(plan, arm) for arm in arms)
    for arm in arms:
        tell = (lambda what, name=arm.name: on_progress(name, what)) if on_progress else None
        script = every if reference is None else script_of(plan, arm)
        result = run_arm(model, requested, arm, script, reference=reference, longest=every.longest, on_progress=tell)
        yield result
        reference = reference or result.transcript
