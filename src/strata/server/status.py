"""What ``/v1/status``, ``/health`` and ``/metrics`` tell: version, plan, configuration in force, statistics.

Lives in ``server``; the numbers are the engine's own ``statistics()``, the same that tests and tables read. It must
not count anything itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.config import OPTIONS, Requested
from strata.config_sources import Effect
from strata.option_values import format_value
from strata.server.answers import Answers
from strata.server.served import ServedEngine
from strata.stats import flatten

__all__ = ["health", "metrics_text", "server_effects", "status"]

# Numbers that can go down; everything else is counted since the engine was loaded.
GAUGES = frozenset(
    {
        "waiting",
        "running",
        "runtime.ready_seconds",
        "runtime.threads",
        "runtime.mailbox_microseconds",
        "runtime.experts.experts_in_vram",
        "runtime.experts.experts_in_ram",
        "runtime.experts.experts_pinned",
        "runtime.experts.pinned_bytes",
        "runtime.experts.page_lock_seconds",
        "runtime.experts.version",
    }
)
SERVER_EFFECTS = (
    Effect("max_tokens", True, "of plain completions; a chat answer runs to the end of its context unless it is set"),
)


def health(answers: Answers) -> dict[str, Any]:
    """``status``: ok, stopping, or degraded when the last request was ended by the engine; then ``reason``."""
    if answers.stopping:
        return {"status": "stopping"}
    if answers.last_error is not None:
        return {"status": "degraded", "reason": str(answers.last_error)}
    return {"status": "ok"}


def status(answers: Answers, version: str, began: float) -> dict[str, Any]:
    """Everything, as JSON. ``began``: ``time.monotonic()`` at the start of the server."""
    engine = answers.engine
    statistics = engine.statistics()
    assert dataclasses.is_dataclass(statistics)
    assert not isinstance(statistics, type)
    return {
        **health(answers),
        "version": version,
        "uptime_seconds": round(time.monotonic() - began, 3),
        "model": engine.name,
        "description": engine.describe(),
        "max_context": engine.max_context,
        "plan": list(engine.plan_lines()),
        "configuration": configuration(engine),
        "statistics": dataclasses.asdict(statistics),
    }


def configuration(engine: ServedEngine) -> list[dict[str, Any]]:
    """Every option: its value, where that came from, and whether it is in force or refused, and why."""
    effects = {one.option: one for one in (*engine.effects(), *server_effects(engine.requested))}
    rows = []
    for one in OPTIONS:
        effect = effects.get(one.name, Effect(one.name, in_force=True))
        rows.append(
            {
                "option": one.spelling,
                "value": format_value(getattr(engine.requested, one.name)),
                "origin": engine.requested.origin(one.name),
                "in_force": effect.in_force,
                "why": effect.why,
            }
        )
    return rows


def server_effects(requested: Requested) -> tuple[Effect, ...]:
    """What serving makes of options, beside the plan's account."""
    return SERVER_EFFECTS if requested.origin("max_tokens") == "default" else ()


def metrics_text(engine: ServedEngine) -> bytes:
    """The statistics in Prometheus' text format: ``strata_`` and the path of each number."""
    registry = CollectorRegistry()
    registry.register(_Statistics(engine))
    return generate_latest(registry)


class _Statistics(Collector):
    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is, is known when it is asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        for path, value in flatten(self._engine.statistics()).items():
            name = "strata_" + path.replace(".", "_")
            family = GaugeMetricFamily if path in GAUGES else CounterMetricFamily
            yield family(name, f"{path} of the engine's statistics", value)
