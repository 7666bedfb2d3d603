"""``strata verify [MODEL]``: the same prompts through every placement, byte for byte.

Lives in ``cli``; the proof itself is ``engine.identity`` and ``engine.arms``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.configure import Configure
from strata.logs import quiet_unless_asked
from strata.option_values import whole

if TYPE_CHECKING:
    from strata.engine.identity import ArmResult

COUNTERS = (
    "hits",
    "misses_pinned",
    "misses_pageable",
    "misses_mapped",
    "misses_file",
    "ring_loads",
    "swaps",
    "buffer_waits",
)


def parse_lengths(text: str) -> tuple[int, ...]:
    return tuple(int(str(whole(1)(part))) for part in text.split(","))


def command(
    configure: Configure,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A pack, checkpoint folder or name.")] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant faults and see that each is found, instead of the arms.")
    ] = False,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only arms whose name holds this text.")] = None,
    prompts: Annotated[str, typer.Option(metavar="N,N,...", help="Prompt lengths in tokens.")] = "1,7,300,2048",
    tokens: Annotated[int, typer.Option(min=4, help="Tokens decoded after each prompt.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line an arm instead of a table.")] = False,
) -> int:
    """Proves that placement never changes a token."""
    requested = configure(name)
    from strata.engine.proof import Proof
    from strata.errors import ConfigError

    try:
        lengths = parse_lengths(prompts)
    except ValueError as error:
        raise ConfigError(f"--prompts {prompts!r} cannot be taken", f"give numbers of tokens, each {error}") from None
    quiet_unless_asked(requested)
    with Proof.open(requested, lengths, tokens) as proof:
        results = []
        rows = proof.self_tests() if self_test else proof.arms(arm or [])
        for result in rows:
            results.append(result)
            print(json.dumps(as_row(result)) if as_json else format_row(result), flush=True)
    good = all(result.good for result in results) and bool(results)
    if not results:
        raise ConfigError(f"no arm is called {' or '.join(arm or [])}", f"arms: {', '.join(proof.arm_names)}")
    words = ("every fault was found", "a fault was MISSED") if self_test else ("identical", "NOT identical")
    print(json.dumps({"good": good, "rows": len(results)}) if as_json else words[0 if good else 1])
    return 0 if good else 1


def as_row(result: ArmResult) -> dict[str, object]:
    transcript = result.transcript
    row: dict[str, object] = {"arm": result.name, "verdict": result.verdict}
    if transcript:
        row |= {"logits_sha256": transcript.sha256, "tokens_sha256": transcript.tokens_sha256}
        row |= {"seconds": round(transcript.seconds, 3), "rounds": transcript.rounds}
    return row | {"counters": dict(result.counters)}


def format_row(result: ArmResult) -> str:
    """Arm, digests, counters that moved, verdict: one line."""
    transcript = result.transcript
    digests = f"{transcript.sha256[:12]} {transcript.tokens_sha256[:8]}" if transcript else " " * 21
    moved = " ".join(f"{name}={result.counters[name]:,}" for name in COUNTERS if result.counters.get(name))
    seconds = f"{transcript.seconds:6.1f} s" if transcript else " " * 8
    return f"{result.name:34} {digests} {seconds}  {result.verdict:12} {moved}"
