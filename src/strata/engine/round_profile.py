"""Takes decode rounds apart into spans: the CPU's by wrapping operations and experts, a card's launch by launch.

Lives in ``engine`` because it runs rounds. A profiled round is slower than a plain one and never measures speed. It
must not know a family or a tier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from strata.engine.sequence import HostSequence

if TYPE_CHECKING:
    import torch

    from strata.engine.runtime import Runtime
    from strata.engine.timeline import Timeline
    from strata.kernels.ops import ExpertExecutor, Ops

__all__ = ["TimedExperts", "profile_rounds", "timed_ops"]

OPS_LANE, EXPERTS_LANE = "operations", "experts"
ROUNDS_LANE, CARD_LANE = "rounds", "card"


class _TimedOps:
    """``Ops`` whose calls are spans of their names."""

    def __init__(self, ops: Ops, timeline: Timeline) -> None:
        self._ops, self._timeline = ops, timeline

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._ops, name)
        if not callable(call):
            return call

        def timed(*arguments: Any, **named: Any) -> Any:
            with self._timeline.measure(name, OPS_LANE):
                return call(*arguments, **named)

        return timed


def timed_ops(ops: Ops, timeline: Timeline) -> Ops:
    """``ops`` with a span around each call."""
    return cast("Ops", _TimedOps(ops, timeline))


class TimedExperts:
    """An ``ExpertExecutor`` whose calls are spans."""

    def __init__(self, experts: ExpertExecutor, timeline: Timeline) -> None:
        self._experts, self._timeline = experts, timeline

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        with self._timeline.measure("experts", EXPERTS_LANE):
            return self._experts(layer, x_TH, ids_TK, weights_TK)


def profile_rounds(runtime: Runtime, ids: Sequence[int], context: int, timeline: Timeline) -> None:
    """Rounds of one row each after ``context`` made-up tokens, on the timeline."""
    if runtime.rounds is not None:
        _profile_on_card(runtime, ids, context, timeline)
        return
    experts = TimedExperts(runtime.experts, timeline)
    ops = timed_ops(runtime.ops, timeline)
    sequence = HostSequence(
        runtime.model, ops, experts, lambda: runtime.model.new_state(runtime.max_context, runtime.kv)
    )
    sequence.pretend(context)
    for number, token in enumerate(ids):
        timeline.mark(f"round {number}")
        with timeline.measure("round", ROUNDS_LANE):
            sequence.forward([token], "all", None, certain=False)
            sequence.commit(1)


def _profile_on_card(runtime: Runtime, ids: Sequence[int], context: int, timeline: Timeline) -> None:
    """Whole rounds by the host's clock, then one of them launch by launch where the machine can time launches."""
    rounds = runtime.rounds
    assert rounds is not None
    sequence = rounds.new_sequence()
    sequence.pretend(context)
    for number, token in enumerate(ids):
        timeline.mark(f"round {number}")
        with timeline.measure("round", ROUNDS_LANE):
            sequence.best_ids([token], None)
            sequence.commit(1)
    timeline.chain(rounds.time_launches(ids[:1]), time.perf_counter(), CARD_LANE)
