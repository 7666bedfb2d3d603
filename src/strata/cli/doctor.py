"""``strata doctor``: prints what was found of this machine; status 1 when something prevents running.

Lives in ``cli``; finding is ``engine.diagnosis``'s.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

MARKS = {"ok": " ", "note": "!", "bad": "X"}
LEFT_COLUMN = 16


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> int:
    """Says what this machine has, what limits it, and what is missing and how to get it."""
    from strata.engine.diagnosis import diagnose
    from strata.memory.probe import probe_machine

    findings = diagnose(probe_machine())
    bad = [finding for finding in findings if finding.state == "bad"]
    if as_json:
        print(json.dumps({"runs": not bad, "findings": [asdict(finding) for finding in findings]}))
        return 1 if bad else 0
    for finding in findings:
        hint = f"\n    {'':{LEFT_COLUMN}}{finding.hint}" if finding.hint else ""
        print(f"{MARKS[finding.state]} {finding.topic:{LEFT_COLUMN}}{finding.text}{hint}")
    verdict = f"{len(bad)} of these (X) keep Strata from running" if bad else "Strata runs here"
    print(f"\n{verdict}")
    return 1 if bad else 0
