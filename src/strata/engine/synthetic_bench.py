"""``strata bench decode|ready --synthetic SHAPE``: a computed model of a released shape, measured with a known routing.

Lives in ``engine`` because it opens, loads and runs a model as any command does, through ``Runtime`` and ``Session``
alone, so that it measures the CPU and a card alike. Tokens are forced from a fixed list; the profile that places
experts is learned on other tokens; what the router did is counted on the very tokens that are measured. It must not
know a model's name or where experts lie. Decision records 0086 and 0087.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata import version
from strata.benchmark_record import Figure
from strata.checkpoint.synthetic_reader import SyntheticWeights
from strata.checkpoint.synthetic_routing import Routing
from strata.config import BY_NAME
from strata.engine.ceilings import RoundBytes, measure_ceilings, median_ceilings, round_seconds
from strata.engine.kept_runs import KeptRuns
from strata.engine.memory_use import MemoryUse
from strata.engine.planning import choose_context
from strata.engine.routing_counts import RoutingCounts, count_routing
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.engine.synthetic_model import open_synthetic
from strata.engine.synthetic_text import token_list
from strata.errors import ConfigError
from strata.experts.profile import PROFILE_FILE, ExpertProfile, find_profile
from strata.paths import find_home

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.engine.models import OpenModel
    from strata.experts.statistics import ExpertStatistics

__all__ = [
    "DECODE_ARMS",
    "Arm",
    "ArmResult",
    "SyntheticCase",
    "check_experts",
    "find_arms",
    "open_learned",
    "results_name",
    "run_decode_arms",
]

logger = logging.getLogger(__name__)

ARM_SECONDS = 8 * 60  # an arm ends within; what it has by then is kept and the next call goes on
LEAST_RATE = 1e-6  # of anything that was measured: a kept run with less is damaged
WARM_ROUNDS = 16
K = 1024
Report = Callable[[str], None]


@dataclass(frozen=True)
class Arm:
    """One measurement: a routing, and the positions before the first measured token. Its figure has this name."""

    name: str
    figure: str
    routing: Routing
    contexts: tuple[int, ...]  # two: the figure is the second's rate over the first's


DECODE_ARMS: tuple[Arm, ...] = (
    Arm("skewed", "decode_plain", "skewed", (K,)),
    Arm("independent", "decode_plain_independent", "independent", (K,)),
    Arm("uniform", "decode_plain_uniform", "uniform", (K,)),
    Arm("depth", "decode_128k_over_1k", "skewed", (K, 128 * K)),
)


def find_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of these names; all that fit a short context for none. Raises ``ConfigError``."""
    known = {arm.name: arm for arm in DECODE_ARMS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--arm {unknown[0]!r} is not known", f"use one of {', '.join(known)}")
    return tuple(known[name] for name in names) or DECODE_ARMS[:3]


@dataclass(frozen=True)
class SyntheticCase:
    """What all arms of a benchmark share. ``tokens`` are measured in each run, ``learn`` learned from before."""

    shape: str
    num_layers: int | None
    weights: SyntheticWeights
    tokens: int = 512
    learn: int = 2048
    runs: int = 3

    def open(self, routing: Routing) -> OpenModel:
        return open_synthetic(self.shape, self.num_layers, replace(self.weights, routing=routing))


@dataclass(frozen=True)
class ArmResult:
    """The figure of an arm with what was counted; ``details`` go beside the machine's numbers in the record."""

    arm: Arm
    figure: Figure
    routing: RoutingCounts | None
    lines: tuple[str, ...]
    on_card: bool
    memory: MemoryUse


def run_decode_arms(
    case: SyntheticCase, arms: Sequence[Arm], requested: Requested, report: Report = print
) -> Iterator[ArmResult]:
    """Measures arms, going on from runs that were kept of the same commit and settings. The weights of a routing are
    loaded once for all its arms, so results come routing by routing. Raises ``ConfigError``."""
    check_contexts(case, arms, requested)
    for routing in dict.fromkeys(arm.routing for arm in arms):
        yield from _run_routing(case, routing, [arm for arm in arms if arm.routing == routing], requested, report)


def _run_routing(
    case: SyntheticCase, routing: Routing, arms: Sequence[Arm], requested: Requested, report: Report
) -> Iterator[ArmResult]:
    """Alone in its frame, so that the weights of one routing are not alive when the next one's are loaded."""
    began = time.perf_counter()
    with open_learned(case, routing, requested, report) as (model, runtime):
        for arm in arms:
            report(f"-- {case.shape}: {arm.name}")
            check_experts(runtime)
            yield _Measuring(case, arm, requested, model, runtime, began, report).run()
            began = time.perf_counter()


@contextmanager
def open_learned(
    case: SyntheticCase, routing: Routing, requested: Requested, report: Report
) -> Iterator[tuple[OpenModel, Runtime]]:
    """The case's model with its profile learned, loaded."""
    model = case.open(routing)
    try:
        learn_profile(model, requested, case.learn, report)
        runtime = Runtime.open(model, requested)
        try:
            yield model, runtime
        finally:
            runtime.close()
    finally:
        model.close()


def check_contexts(case: SyntheticCase, arms: Sequence[Arm], requested: Requested) -> None:
    """Before the first arm takes minutes. Raises ``ConfigError`` where one needs more positions."""
    model = case.open(arms[0].routing)
    max_context = choose_context(requested, model.config.max_positions)
    model.close()
    for arm in arms:
        check_context(arm, case.tokens, max_context)


def check_context(arm: Arm, tokens: int, max_context: int) -> None:
    if max_context <= tokens:
        raise ConfigError(f"--decode {tokens}: the context holds {max_context:,}", "give a smaller --decode")
    if max(arm.contexts) > K and max_context < max(arm.contexts) + tokens:
        raise ConfigError(
            f"arm {arm.name} decodes at {max(arm.contexts):,} positions, the context holds {max_context:,}",
            f"give --max-context {max(arm.contexts) + max(tokens, K)}",
        )


def check_experts(runtime: Runtime) -> None:
    """Raises ``ConfigError`` for a card whose rounds would have to read a file that there is not."""
    held = runtime.statistics().experts
    missing = runtime.plan.shape.total_experts - held.experts_in_vram - held.experts_in_ram
    if runtime.rounds is not None and missing > 0:
        raise ConfigError(
            f"{missing:,} experts are neither in VRAM nor in RAM, and a computed model has no file to read them from",
            "raise --ram-gib or --vram-gib, or leave --resident-budget-gib out",
        )


def learn_profile(model: OpenModel, requested: Requested, tokens: int, report: Report) -> ExpertProfile:
    """The model's kept profile, or one learned now on ``tokens`` tokens that are never measured, and kept."""
    reader = model.reader
    layers, experts = len(reader.expert_layers), reader.num_experts
    kept = find_profile(reader.folder, reader.digest, layers, experts)
    if kept is not None and kept.rows >= tokens:
        report(f"expert profile: kept, learned on {kept.rows:,} other tokens")
        return kept
    (reader.folder / PROFILE_FILE).unlink(missing_ok=True)
    began = time.perf_counter()
    runtime = Runtime.open(model, requested)
    try:
        session = Session(runtime)
        ids = token_list(runtime.vocabulary, tokens, "profile")
        for first in range(0, tokens, runtime.max_context):
            session.reset()
            session.read_prompt(ids[first : first + runtime.max_context])
        profile = ExpertProfile(tokens, runtime.count_picks())
    finally:
        runtime.close()
    profile.write(reader.folder, reader.digest)
    report(f"expert profile: learned on {tokens:,} other tokens in {time.perf_counter() - began:.1f} s")
    return profile


class _Measuring:
    """One arm on an open runtime."""

    def __init__(
        self,
        case: SyntheticCase,
        arm: Arm,
        requested: Requested,
        model: OpenModel,
        runtime: Runtime,
        began: float,
        report: Report,
    ) -> None:
        self._case, self._arm, self._requested = case, arm, requested
        self._model, self._runtime, self._report = model, runtime, report
        self._began = began
        self._session = Session(runtime)
        self._ids = token_list(runtime.vocabulary, case.tokens * case.runs, "measured")
        room = runtime.max_context - case.tokens
        self._contexts = [min(context, room) for context in arm.contexts]

    def run(self) -> ArmResult:
        self._report(self._runtime.describe())
        ceilings = measure_ceilings(self._runtime)
        for line in ceilings.lines():
            self._report(line)
        kept = self._kept()
        for token in token_list(self._runtime.vocabulary, WARM_ROUNDS, "warm"):
            self._session.greedy_round([token])
            self._session.commit(1)
        while len(runs := kept.read(self._arm.name)) < self._case.runs:
            if runs and time.perf_counter() - self._began > ARM_SECONDS * (1 - 1 / (len(runs) + 1)):
                self._report(f"{len(runs)} of {self._case.runs} runs in {ARM_SECONDS} s; the next call goes on")
                break
            run = self._measure(self._ids_of(len(runs)))
            kept.add(self._arm.name, run | {name: rate for name, rate in vars(ceilings).items() if rate is not None})
        return self._result(kept.read(self._arm.name))

    def _kept(self) -> KeptRuns:
        wanted = self._requested
        settings = {
            name: str(getattr(wanted, name))
            for name in wanted.origins
            if BY_NAME[name].group not in ("log", "sampling")
        }
        key = {
            "model": self._model.reader.folder.name, "commit": version.commit(), "tokens": self._case.tokens,
            "learn": self._case.learn, "context": self._contexts, "slots": self._runtime.plan.num_slots,
        }  # fmt: skip
        return KeptRuns(find_home().profiles, key | settings, self._is_whole)

    def _is_whole(self, run: Mapping[str, float]) -> bool:
        numbers = range(len(self._contexts))
        counted = all(f"hits{number}" in run and f"misses{number}" in run for number in numbers)
        rates = {"ram", *(f"rate{number}" for number in numbers)} | (run.keys() & {"vram", "link", "both"})
        return counted and all(run.get(name, 0) >= LEAST_RATE for name in rates)

    def _ids_of(self, run: int) -> list[int]:
        """Its part of the fixed list: swaps would know tokens that an earlier run has decoded."""
        return self._ids[run * self._case.tokens : (run + 1) * self._case.tokens]

    def _measure(self, ids: Sequence[int]) -> dict[str, float]:
        """One run over ``ids``: rates in tok/s by context, and how many of the picks were hits."""
        found: dict[str, float] = {}
        for number, context in enumerate(self._contexts):
            before = self._runtime.statistics().experts
            found[f"rate{number}"] = self._decode(context, ids)
            after = self._runtime.statistics().experts
            hits, misses = after.hits - before.hits, after.misses - before.misses
            found[f"hits{number}"], found[f"misses{number}"] = hits / self._case.tokens, misses / self._case.tokens
        rate = f"{found['rate0']:.4g} tok/s"
        if len(self._contexts) > 1:
            rate += f" at {self._contexts[0]:,}, {found['rate1']:.4g} at {self._contexts[1]:,}"
        self._report(f"run: {rate}, hit rate {100 * self._hit_rate(found):.1f} %")
        return found

    def _decode(self, context: int, ids: Sequence[int]) -> float:
        session = self._session
        session.pretend(context)
        began = time.perf_counter()
        for token in ids:
            session.greedy_round([token])
            session.commit(1, decoded=True)
        return len(ids) / (time.perf_counter() - began)

    def _hit_rate(self, run: dict[str, float]) -> float:
        picks = run["hits0"] + run["misses0"]
        return run["hits0"] / picks if picks else 0.0

    def _count(self) -> RoutingCounts | None:
        """Counts the picks of the first run's tokens, in rounds that nobody times."""
        ids = self._ids_of(0)
        if len(ids) < 2:
            return None
        session, runtime = self._session, self._runtime
        session.pretend(self._contexts[0])
        before = runtime.count_picks()
        rows: list[NDArray[np.bool_]] = []
        for token in ids:
            session.round([token])
            session.commit(1)
            after = runtime.count_picks()
            rows.append(after > before)
            before = after
        return count_routing(np.stack(rows))

    def _result(self, runs: Sequence[dict[str, float]]) -> ArmResult:
        routing = self._count()
        rates = [run["rate0"] for run in runs]
        hits, misses = (statistics.median(run[name] for run in runs) for name in ("hits0", "misses0"))
        read = self._bytes(hits, misses)
        ceiling = 1 / round_seconds(median_ceilings(runs), read)
        hit_rate = hits / (hits + misses) if hits + misses else 0.0
        figure = self._figure(rates, "tok/s", round(ceiling, 2), hit_rate)
        memory = self._runtime.memory_use()
        lines = [read.line(), *self._tiers(self._runtime.statistics().experts), *memory.lines()]
        if routing is not None:
            lines.insert(0, routing.line())
        lines.append(f"{self._arm.name}: {figure.value:.4g} tok/s, {figure.percent} % of the bound {ceiling:.4g}")
        if len(self._contexts) > 1:
            ratios = [run["rate1"] / run["rate0"] for run in runs]
            figure = self._figure(ratios, "ratio", None, hit_rate)
            lines.append(f"{self._contexts[1]:,} over {self._contexts[0]:,} positions: {figure.value:.3f}")
        for line in lines:
            self._report(line)
        return ArmResult(self._arm, figure, routing, tuple(lines), self._runtime.rounds is not None, memory)

    def _bytes(self, hits: float, misses: float) -> RoundBytes:
        """Of a token: every dense weight but the embedding, of which it reads a row; the recurrent state, read and
        written; the keys and values attended; its experts."""
        config, plan, reader = self._model.config, self._runtime.plan, self._model.reader
        kv = self._runtime.kv
        embedding = max(reader.matrix_bytes(name) for name in reader.manifest.dense if "embed" in name)
        position = config.position_bytes(kv)
        dense = plan.shape.dense_bytes - embedding + 2 * plan.shape.state_bytes + position * self._attended()
        blob = plan.shape.blob_bytes
        return RoundBytes(dense, hits * blob, misses * blob, config.num_layers)

    def _attended(self) -> float:
        return self._contexts[0] + self._case.tokens / 2

    def _figure(self, values: Sequence[float], unit: str, ceiling: float | None, hit_rate: float) -> Figure:
        wanted = self._requested
        return Figure(
            round(statistics.median(values), 4),
            unit,
            ceiling=ceiling,
            min=round(min(values), 4),
            max=round(max(values), 4),
            runs=len(values),
            vram_gib=wanted.vram_gib,
            max_context=self._runtime.max_context,
            kv=str(wanted.kv),
            dense=self._case.weights.dense,
            routing=self._arm.routing,
            hit_rate=round(hit_rate, 4),
            context_tokens=self._contexts[-1],
        )

    def _tiers(self, found: ExpertStatistics) -> list[str]:
        blob = self._runtime.plan.shape.blob_bytes / 1e9
        parts = {
            "VRAM": found.hits, "page-locked RAM": found.misses_pinned, "RAM": found.misses_pageable,
            "mapped": found.misses_mapped, "computed anew": found.misses_file,
        }  # fmt: skip
        served = ", ".join(f"{name} {count * blob:,.1f} GB" for name, count in parts.items() if count)
        over = f"{found.alias_picks:,} picks read over the link, {found.swaps:,} swaps"
        locked = f"{found.experts_pinned:,} page-locked, path {found.page_lock_path}"
        held = f"held: {found.experts_in_vram:,} experts in slots, {found.experts_in_ram:,} in RAM ({locked})"
        return [f"served since the start: {served}; {over}", held]


def results_name(case: SyntheticCase, requested: Requested, *, on_card: bool) -> str:
    """``<shape>-<cap>gib``; a shape that was cut names its layers."""
    cap = "cpu" if not on_card else "all" if requested.vram_gib is None else f"{requested.vram_gib:g}"
    layers = "" if case.num_layers is None else f"-{case.num_layers}layers"
    return f"{case.shape}{layers}-{cap}gib"
