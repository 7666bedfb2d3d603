"""How fast a plan would run, as arithmetic over counts and measured rates; nothing is run or read.

Lives in ``engine`` because it joins a subject, its plan and a machine's rates. A token of decode and a chunk of a
prompt are sums of what they count: bytes and multiply-adds of dense products, of experts by the place they come from,
of attention, and what each layer costs beside that. Picks are taken as uniform: a real text picks some experts more
often, so that a cache does better than forecast. It computes for the CPU; a card has other rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from strata.engine.plan_subject import DenseMatrix, PlanSubject
from strata.engine.rates import LayerCosts, Rates
from strata.experts.dispatch import WINDOW_ROWS
from strata.memory.planner import ResolvedPlan

__all__ = ["PROMPT_TOKENS", "Forecast", "forecast", "interpolate"]

PROMPT_TOKENS = 2048
VECTOR_PASSES = 30  # readings and writings of a hidden vector a layer, by norms, sums and the results of experts


@dataclass(frozen=True)
class Places:
    """Share of all experts by where a pick finds them: in memory, in a file that the page cache holds, on the drive."""

    memory: float
    cached: float
    drive: float
    ring: float  # of those in memory: what a prompt must move into the ring first
    mapped: bool


@dataclass(frozen=True)
class Forecast:
    """Tokens a second; ``decode_parts`` in seconds a token, ``prompt_parts`` in seconds of the whole prompt."""

    prompt_tokens: int
    context_tokens: int
    prompt_rate: float
    decode_rate: float
    prompt_parts: Mapping[str, float]
    decode_parts: Mapping[str, float]

    def lines(self) -> list[str]:
        prompt = f"prompt {self.prompt_rate:.3g} tok/s ({self.prompt_tokens:,} tokens)"
        decode = f"decode {self.decode_rate:.3g} tok/s after {self.context_tokens:,} tokens"
        return [
            f"expected speed: {prompt}, {decode}, were all experts picked alike",
            f"  ms a token: {_in_ms(self.decode_parts, 1)}",
            f"  ms a prompt token: {_in_ms(self.prompt_parts, self.prompt_tokens)}",
        ]

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": self.prompt_rate,
            "prompt_seconds": dict(self.prompt_parts),
            "context_tokens": self.context_tokens,
            "decode_tokens_per_second": self.decode_rate,
            "decode_seconds": dict(self.decode_parts),
        }


def _in_ms(parts: Mapping[str, float], tokens: int) -> str:
    return ", ".join(f"{name} {1e3 * seconds / tokens:.3g}" for name, seconds in parts.items() if seconds)


def forecast(
    subject: PlanSubject, plan: ResolvedPlan, rates: Rates, *, prompt_tokens: int | None = None
) -> Forecast | None:
    """The speed of a prompt and of decode after it. None where the rates lack this model's formats or family."""
    costs = rates.layers.get(subject.config.family)
    if costs is None or subject.expert_format not in rates.kernels.experts:
        return None
    tokens = min(PROMPT_TOKENS if prompt_tokens is None else prompt_tokens, plan.request.max_context)
    places = find_places(plan)
    arithmetic = _Arithmetic(subject, plan, rates, costs, places)
    decode = arithmetic.token(tokens)
    chunks = [arithmetic.chunk(first, min(plan.request.chunk_rows, tokens - first))
              for first in range(0, tokens, plan.request.chunk_rows)]  # fmt: skip
    prompt = {name: sum(chunk[name] for chunk in chunks) for name in chunks[0]}
    return Forecast(tokens, tokens, tokens / sum(prompt.values()), 1 / sum(decode.values()), prompt, decode)


def find_places(plan: ResolvedPlan) -> Places:
    """Where uniform picks find their experts. The page cache is taken as warm, as far as RAM can hold the file."""
    total = plan.shape.total_experts
    in_ram = (
        max(plan.num_ram_experts, plan.num_slots) if plan.mode == "arena" else plan.num_ram_experts + plan.num_slots
    )
    outside = max(0, total - min(total, in_ram))
    room = max(0, plan.request.ram_bytes - plan.ram_bytes)
    cached = 0.0 if plan.direct_reads else min(1.0, room / (outside * plan.stride)) if outside else 0.0
    ring = 0.0 if plan.ring_slots == 0 else 1 - plan.num_slots / total
    return Places(1 - outside / total, outside / total * cached, outside / total * (1 - cached), ring,
                  plan.mode == "mapped")  # fmt: skip


def interpolate(rates: Mapping[int, float], rows: float) -> float:
    """The rate at ``rows`` between those measured, straight in logarithms; the first and last beyond them."""
    known = sorted(rates)
    if rows <= known[0]:
        return rates[known[0]]
    for low, high in pairwise(known):
        if rows <= high:
            share = math.log(rows / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(rates[low]) + share * math.log(rates[high]))
    return rates[known[-1]]


@dataclass(frozen=True)
class _Arithmetic:
    subject: PlanSubject
    plan: ResolvedPlan
    rates: Rates
    costs: LayerCosts
    places: Places

    @property
    def blob_bytes(self) -> int:
        return self.plan.shape.blob_bytes

    @property
    def expert_work(self) -> int:
        """Multiply-adds of one row in one expert."""
        return 3 * self.subject.layout.hidden * self.subject.layout.intermediate

    def token(self, context: int) -> dict[str, float]:
        """Seconds of one decode round of one row by part."""
        shape, places, memory = self.plan.shape, self.places, self.rates.bandwidths
        layers, kernels = self.subject.config.num_layers, self.rates.kernels
        picks = shape.top_k * layers
        each = self.expert_work / interpolate(kernels.experts[self.subject.expert_format], 1)
        in_place = places.memory + (places.cached if places.mapped else 0.0)
        fetched = 1 - in_place
        reading = picks * self._reading(places.cached * (not places.mapped), places.drive)
        computing = picks * each
        waiting = max(0.0, reading - picks * in_place * each) + picks * fetched * self.costs.a_read * (
            not places.mapped
        )
        return {
            "dense": sum(self._product(matrix, 1) for matrix in self.subject.matrices),
            "experts": computing,
            "experts from the file": waiting,
            "attention and state": self.subject.config.mixing_work(context) / kernels.attention_row
            + 2 * shape.state_bytes / memory.memory_read,
            "launches": layers * self.costs.a_round,
        }

    def chunk(self, first: int, rows: int) -> dict[str, float]:
        """Seconds of a prompt's chunk of ``rows`` rows at position ``first`` by part."""
        shape, places, memory = self.plan.shape, self.places, self.rates.bandwidths
        layers, kernels = self.subject.config.num_layers, self.rates.kernels
        picked = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** rows)
        rows_each = rows * shape.top_k / picked
        rate = interpolate(kernels.experts[self.subject.expert_format], rows_each)
        computing = layers * picked * rows_each * self.expert_work / rate
        in_place = places.memory + (places.cached if places.mapped else 0.0)
        reading = layers * picked * self._reading(places.cached * (not places.mapped), places.drive)
        waiting = max(0.0, reading - computing * in_place)
        moving = 0.0
        if rows > WINDOW_ROWS and places.ring:
            # The copying threads share the processors with those that compute, so that their times add up.
            moving = layers * picked * places.ring * (self.blob_bytes / memory.memory_copy + self.costs.a_load)
        elif not places.mapped:
            waiting += layers * picked * (1 - in_place) * self.costs.a_read
        vectors = VECTOR_PASSES * 4 * shape.hidden * rows * layers / memory.memory_copy
        return {
            "dense": sum(self._product(matrix, rows) for matrix in self.subject.matrices),
            "experts": computing,
            "experts from the file": waiting,
            "moving experts": moving,
            "attention and state": rows * self.subject.config.mixing_work(first + rows // 2) / kernels.attention_rows,
            "launches": layers * (self.costs.a_round + rows * self.costs.a_row) + vectors,
        }

    def _reading(self, cached: float, drive: float) -> float:
        """Seconds of reading for a pick, of which these shares come from the page cache and from the drive."""
        memory = self.rates.bandwidths
        from_cache = memory.cached_read or memory.memory_copy
        from_drive = memory.drive_pieces or from_cache
        return self.blob_bytes * (cached / from_cache + drive / from_drive)

    def _product(self, matrix: DenseMatrix, rows: int) -> float:
        """Seconds of a product; of the head (as many rows as the vocabulary) a prompt needs the last row alone."""
        needed = 1 if matrix.rows == self.subject.config.vocabulary else rows
        rate = interpolate(self.rates.kernels.linear[matrix.format], needed)
        return needed * matrix.rows * matrix.columns / rate
