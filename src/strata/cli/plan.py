"""``strata plan [MODEL]``: what would lie where, and how fast it would be, before anything is downloaded or taken.

Lives in ``cli``; planning is ``engine.plan_report``'s, the arithmetic ``memory.planner``'s and ``engine.forecast``'s.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from strata import interrupts
from strata.cli.configure import Configure
from strata.errors import MemoryPlanError


def command(
    configure: Configure,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A pack, checkpoint folder, config.json, name, or known shape."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine again before the speed is forecast.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> int:
    """Plans a model on this PC, or on the one that --device, --vram-gib and --ram-gib describe."""
    from strata.engine.plan_report import planned_effects
    from strata.engine.runtime import probe

    requested = configure(name, effects=lambda asked: planned_effects(asked, probe(asked)))
    from strata.engine.calibration import measure_rates
    from strata.engine.plan_report import report
    from strata.engine.rates import kept_rates

    interrupts.in_order()
    rates = measure_rates(requested) if measure else kept_rates(requested)
    try:
        found = report(requested, probe(requested), rates)
    except MemoryPlanError as error:
        if as_json:
            print(json.dumps({"refused": error.message, "hint": error.hint, "short_bytes": error.short_bytes}))
        raise
    print(json.dumps(found.as_json()) if as_json else "\n".join(found.lines()))
    return 0
