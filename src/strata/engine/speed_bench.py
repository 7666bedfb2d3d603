"""``strata bench decode|prompt``: what a loaded model does a second, beside what the forecast said it would.

Lives in ``engine`` because it loads a model as any command does and knows its plan. The forecast is made before the
model is loaded; rates of this machine that are not there yet are measured first.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.benchmark_record import Record, measured
from strata.engine.calibration import measure_rates
from strata.engine.engine import Engine
from strata.engine.forecast import Forecast, covers, forecast
from strata.engine.models import open_model
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.rates import kept_rates
from strata.engine.runtime import Runtime, kv_format
from strata.errors import ConfigError
from strata.kernels.bench import machine

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.engine.rates import Rates
    from strata.memory.planner import ResolvedPlan

__all__ = ["Measured", "SpeedBench", "bench_speed", "measure_speed"]

Kind = Literal["decode", "prompt"]


@dataclass(frozen=True)
class SpeedBench:
    """Rates in tok/s of each run, and the rate that was predicted."""

    kind: Kind
    rates: tuple[float, ...]
    predicted: float
    expected: Forecast

    def lines(self) -> list[str]:
        median, runs = statistics.median(self.rates), len(self.rates)
        found = f"{self.kind}: {median:.4g} tok/s (median of {runs}, {min(self.rates):.4g} to {max(self.rates):.4g})"
        ratios = f"measured is {median / self.predicted:.2f} of it, the best run {max(self.rates) / self.predicted:.2f}"
        return [found, f"predicted: {self.predicted:.4g} tok/s; {ratios}", *self.expected.lines()[1:]]


@dataclass(frozen=True)
class Measured:
    """Rates in tok/s of each run, what was predicted, and the plan that was in force."""

    prompt: tuple[float, ...]
    decode: tuple[float, ...]
    expected: Forecast
    plan: ResolvedPlan


def bench_speed(
    requested: Requested, kind: Kind, *, prompt: int, tokens: int, runs: int, measure: bool, command: str
) -> tuple[SpeedBench, Record]:
    """Reads ``runs`` fresh prompts of ``prompt`` tokens and decodes ``tokens`` greedily after each.

    ``measure`` measures the machine again first. The record holds the rate, the prediction and their ratio.
    """
    subject = find_subject(requested.model, kv_format(requested))
    rates = None if measure else kept_rates(requested)
    if rates is None or not covers(rates, subject):
        rates = measure_rates(requested)
    found = measure_speed(requested, subject, rates, prompt=prompt, tokens=tokens, runs=runs)
    expected, plan = found.expected, found.plan
    predicted = expected.decode_rate_over(tokens) if kind == "decode" else expected.prompt_rate
    speeds = found.decode if kind == "decode" else found.prompt
    bench = SpeedBench(kind, speeds, predicted, expected)
    name = "decode_plain" if kind == "decode" else f"prompt_{expected.prompt_tokens}"
    figures = {
        name: measured(speeds, "tok/s", predicted),
        f"{name}_predicted": measured([predicted], "tok/s"),
        f"{name}_over_predicted": measured([speed / predicted for speed in speeds], "ratio"),
    }
    details = {
        "model": subject.name,
        "ram_mode": plan.mode,
        "slots": plan.num_slots,
        "experts_in_ram": plan.num_ram_experts,
        "prompt_tokens": expected.prompt_tokens,
        "decode_tokens": tokens,
    }
    return bench, Record(command, machine() | details, figures)


def measure_speed(
    requested: Requested,
    subject: PlanSubject,
    rates: Rates,
    *,
    prompt: int,
    tokens: int,
    runs: int,
    greedy: bool = True,
) -> Measured:
    """Loads the model and runs it; the forecast is that of the plan that loading made. The rates cover the model.

    Without ``greedy`` the decoded tokens are random ones, whose experts are picked about alike, as a forecast takes it.
    """
    opened = open_model(requested.model)
    try:
        engine = Engine(opened, requested, runtime := Runtime.open(opened, requested))
    except BaseException:
        opened.close()
        raise
    with engine:
        room = engine.max_context - tokens
        if room < 1:
            raise ConfigError(f"--decode {tokens}: the context holds {engine.max_context:,}", "give a smaller --decode")
        length = min(prompt, room)
        found = []
        for run in range(runs):
            given = None if greedy else _fresh_prompt(runs + run, tokens, runtime.vocabulary)
            found.append(engine.measure(_fresh_prompt(run, length, runtime.vocabulary), tokens, given=given))
        expected = forecast(subject, runtime.plan, rates, prompt_tokens=length)
        plan = runtime.plan
    assert expected is not None, "the rates cover the model"
    read, decoded = (
        tuple(1e3 * one[f"{kind}_n"] / one[f"{kind}_ms"] for one in found) for kind in ("prompt", "decode")
    )
    return Measured(read, decoded, expected, plan)


def _fresh_prompt(run: int, length: int, vocabulary: int) -> list[int]:
    """Random tokens; the first differs from run to run, so that nothing of an earlier prompt can be kept."""
    source = random.Random(run)
    return [run % vocabulary, *(source.randrange(min(256, vocabulary)) for _ in range(length - 1))]
