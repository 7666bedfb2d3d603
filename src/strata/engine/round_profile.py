"""Takes decode rounds and prompts apart: the CPU's by wrapping operations and experts, a card's by launches.

Lives in ``engine`` because it runs rounds. A profiled round is slower than a plain one and never measures speed. It
must not know a family or a tier.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from strata.engine.sequence import HostSequence, TokenSequence
from strata.engine.session import chunk_bounds
from strata.kernels.cuda.program import MAX_WINDOW

if TYPE_CHECKING:
    import torch

    from strata.engine.device_rounds import Answer
    from strata.engine.runtime import Runtime
    from strata.engine.timeline import Timeline
    from strata.kernels.ops import ExpertExecutor, Ops

__all__ = ["CARD_LANE", "ROUNDS_LANE", "TimedExperts", "profile_prompt", "profile_rounds", "timed_ops"]

OPS_LANE, EXPERTS_LANE = "operations", "experts"
ROUNDS_LANE, CARD_LANE = "rounds", "card, one round"
TIMED_RUNS = 5


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
    """Rounds of one row each after ``context`` made-up tokens, on the timeline. On a card whole rounds by the host's
    clock, then one of them launch by launch where the machine can time launches."""
    sequence = _timed_sequence(runtime, timeline)
    sequence.pretend(context)
    for number, token in enumerate(ids):
        timeline.mark(f"round {number}")
        with timeline.measure("round", ROUNDS_LANE):
            sequence.best_ids([token], None)
            sequence.commit(1)
    _chain_launches(runtime, ids[:1], "logits", timeline)


def profile_prompt(runtime: Runtime, ids: Sequence[int], timeline: Timeline) -> None:
    """A prompt from an empty sequence, in the chunks that it is read in, on the timeline: on a card these are windows,
    of which one is taken apart launch by launch."""
    sequence = _timed_sequence(runtime, timeline)
    rows, name = (runtime.chunk_rows, "chunk") if runtime.rounds is None else (MAX_WINDOW, "window")
    for number, (first, stop) in enumerate(chunk_bounds(0, len(ids), rows)):
        timeline.mark(f"{name} {number}")
        with timeline.measure(name, ROUNDS_LANE):
            sequence.forward(ids[first:stop], "last" if stop == len(ids) else "none", None, certain=True)
            sequence.commit(stop - first)
    _chain_launches(runtime, ids[:MAX_WINDOW], "none", timeline)


def _timed_sequence(runtime: Runtime, timeline: Timeline) -> TokenSequence:
    """An empty sequence; the CPU's operations and experts are spans."""
    if runtime.rounds is not None:
        return runtime.rounds.new_sequence()
    model = runtime.model
    return HostSequence(
        model,
        timed_ops(runtime.ops, timeline),
        TimedExperts(runtime.experts, timeline),
        lambda: model.new_state(runtime.max_context, runtime.kv),
    )


def _chain_launches(runtime: Runtime, ids: Sequence[int], answer: Answer, timeline: Timeline) -> None:
    """One round, of each launch the median of a few: the first runs with kernels that no cache holds yet."""
    if runtime.rounds is None:
        return
    runs = [runtime.rounds.time_launches(ids, answer) for _ in range(TIMED_RUNS)]
    medians = [(one[0][0], statistics.median(seconds for _, seconds in one)) for one in zip(*runs, strict=True)]
    timeline.chain(medians, time.perf_counter(), CARD_LANE)
