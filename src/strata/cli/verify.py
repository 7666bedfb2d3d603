"""``strata verify [MODEL]``: the same prompts through every placement, byte for byte.

Lives in ``cli``; the proof itself is ``engine.identity`` and ``engine.arms``.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from strata import interrupts
from strata.cli.configure import Configure
from strata.logs import quiet_unless_asked
from strata.option_values import whole

if TYPE_CHECKING:
    from strata.engine.identity import ArmResult

logger = logging.getLogger(__name__)

MISSES = ("misses_pinned", "misses_pageable", "misses_mapped", "misses_file")
MOVED = ("direct_bytes", "staged_bytes", "file_bytes", "saved_bytes")
COUNTERS = (
    "page_lock_path",
    "hits",
    *MISSES,
    "alias_picks",
    "handed_over",
    *MOVED,
    "ring_loads",
    "swaps",
    "buffer_waits",
)
HEADER = f"{'':8} {'arm':39} {'logits':12} {'tokens':8} {'time':>8}  verdict, and what the arm did"


def parse_lengths(text: str) -> tuple[int, ...]:
    return tuple(int(str(whole(1)(part))) for part in text.split(","))


def command(
    configure: Configure,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A pack, checkpoint folder or name.")] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant faults and see that each is found, instead of the arms.")
    ] = False,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only arms whose name holds this text.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Prompt lengths in tokens, not those at the edges of kernels' blocks."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=4, help="Tokens decoded after each prompt. Default 8, after two of them 64.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every arm plays every length, on both models.")] = False,
    only_model: Annotated[
        bool, typer.Option("--only-model", help="Without the computed model of a released model's width.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line an arm instead of a table.")] = False,
) -> int:
    """Proves that placement never changes a token."""
    requested = configure(name)
    from strata.engine.proof import Proof
    from strata.errors import ConfigError

    interrupts.in_order()
    try:
        lengths = None if prompts is None else parse_lengths(prompts)
    except ValueError as error:
        raise ConfigError(f"--prompts {prompts!r} cannot be taken", f"give numbers of tokens, each {error}") from None
    if self_test and arm:
        raise ConfigError("--self-test has its own arms", "leave --arm out")
    quiet_unless_asked(requested)
    wide = not (only_model or self_test)
    with Proof.open(requested, lengths, tokens, wide=wide, full=full) as proof:
        total = proof.count_self_tests() if self_test else len(proof.chosen(arm or []))
        if not total:
            names = ", ".join(f"'{name}'" for name in proof.arm_names)
            raise ConfigError(f"no arm is called {' or '.join(arm or [])}", f"arms: {names}")
        if proof.overruled:
            logger.warning("every arm sets these by itself, they are not taken: %s", ", ".join(proof.overruled))
        if not as_json:
            shown = ", ".join(f"{length:,}" for length in proof.prompt_lengths)
            print(f"sha256 of all logits and of all tokens; each arm plays its part of prompts of {shown} tokens")
            if self_test and proof.not_planted:
                print(f"not planted on a card, --device cpu has them: {', '.join(proof.not_planted)}")
            print(HEADER)
        results: list[ArmResult] = []
        for result in proof.self_tests() if self_test else proof.arms(arm or []):
            results.append(result)
            print(
                json.dumps(as_row(result)) if as_json else f"{f'{len(results)} of {total}':8} {format_row(result)}",
                flush=True,
            )
    good = all(result.good for result in results)
    if as_json:
        print(json.dumps({"good": good, "rows": len(results)}))
    else:
        print(last_line(results, self_test))
    return 0 if good else 1


def last_line(results: list[ArmResult], self_test: bool) -> str:
    """The verdict over all rows, and the way out where the run proved nothing."""
    if self_test:
        return "every fault was found" if all(result.good for result in results) else "a fault was MISSED"
    if any(result.difference for result in results):
        return "NOT identical"
    idle = [result.name for result in results if not result.good]
    if idle:
        drafts = any("drafts" in what for result in results for what in result.missing)
        way = "more --tokens exercise drafts" if drafts else "longer --prompts exercise streaming"
        return f"not proved: {', '.join(idle)} did not do what they are for ({way})"
    return "identical"


def as_row(result: ArmResult) -> dict[str, object]:
    transcript = result.transcript
    row: dict[str, object] = {"arm": result.name, "verdict": result.verdict}
    if transcript:
        row |= {"logits_sha256": transcript.sha256, "tokens_sha256": transcript.tokens_sha256}
        row |= {"prompts": transcript.lengths}
        row |= {"seconds": round(transcript.seconds, 3), "rounds": transcript.rounds}
    return row | {"tiers_met": result.met, "counters": dict(result.counters)}


def format_row(result: ArmResult) -> str:
    """Arm, digests, counters that moved, verdict: one line."""
    transcript = result.transcript
    digests = f"{transcript.sha256[:12]} {transcript.tokens_sha256[:8]}" if transcript else f"{'-':21}"
    moved = " ".join(f"{name}={result.counters[name]:,}" for name in COUNTERS if result.counters.get(name))
    seconds = f"{transcript.seconds:6.1f} s" if transcript else " " * 8
    return f"{result.name:39} {digests} {seconds}  {result.verdict:12} {moved}"
