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
from strata.kernels.rates import ByRows
from strata.memory.planner import ResolvedPlan, lent_slots

__all__ = ["PROMPT_TOKENS", "Forecast", "covers", "forecast", "interpolate", "unmeasured"]

PROMPT_TOKENS = 2048
MANY_PICKS = 64  # of so many, the number that is read hardly varies
VECTOR_PASSES = 30  # readings and writings of a hidden vector a layer, by norms, sums and the results of experts


@dataclass(frozen=True)
class Places:
    """Share of all experts by where a pick finds them: in memory, in a file that the page cache holds, on the drive."""

    memory: float
    cached: float
    drive: float
    ring: float  # of all: what a prompt must move into the ring first, lent slots' own experts included
    lent: int  # slots that a prompt borrows and that are filled again after it
    mapped: bool


@dataclass(frozen=True)
class Forecast:
    """Tokens a second; ``decode_parts`` in seconds a token, ``prompt_parts`` in seconds of the whole prompt.

    ``refill_seconds``: once after a prompt, in its first round, for the slots that it borrowed.
    """

    prompt_tokens: int
    context_tokens: int
    prompt_rate: float
    decode_rate: float
    prompt_parts: Mapping[str, float]
    decode_parts: Mapping[str, float]
    refill_seconds: float = 0.0

    def decode_rate_over(self, tokens: int) -> float:
        """Tokens a second of the first so many after a prompt."""
        return tokens / (tokens / self.decode_rate + self.refill_seconds)

    def lines(self) -> list[str]:
        prompt = f"prompt {self.prompt_rate:.3g} tok/s ({self.prompt_tokens:,} tokens)"
        decode = f"decode {self.decode_rate:.3g} tok/s after {self.context_tokens:,} tokens"
        refill = (
            f"; once after a prompt {1e3 * self.refill_seconds:.3g} for borrowed slots" if self.refill_seconds else ""
        )
        return [
            f"expected speed: {prompt}, {decode}, were all experts picked alike",
            f"  ms a token: {_in_ms(self.decode_parts, 1)}{refill}",
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
            "refill_seconds": self.refill_seconds,
        }


def _in_ms(parts: Mapping[str, float], tokens: int) -> str:
    return ", ".join(f"{name} {1e3 * seconds / tokens:.3g}" for name, seconds in parts.items() if seconds)


def forecast(
    subject: PlanSubject, plan: ResolvedPlan, rates: Rates, *, prompt_tokens: int | None = None
) -> Forecast | None:
    """The speed of a prompt and of decode after it. None where the rates lack this model's formats or family."""
    if not covers(rates, subject):
        return None
    costs = rates.layers[subject.config.family]
    tokens = min(PROMPT_TOKENS if prompt_tokens is None else prompt_tokens, plan.request.max_context)
    places = find_places(plan)
    arithmetic = _Arithmetic(subject, plan, rates, costs, places)
    decode = arithmetic.token(tokens)
    chunks = [arithmetic.chunk(first, min(plan.request.chunk_rows, tokens - first))
              for first in range(0, tokens, plan.request.chunk_rows)]  # fmt: skip
    prompt = {name: sum(chunk[name] for chunk in chunks) for name in chunks[0]}
    refill = places.lent * arithmetic.a_load if tokens > WINDOW_ROWS else 0.0
    return Forecast(tokens, tokens, tokens / sum(prompt.values()), 1 / sum(decode.values()), prompt, decode, refill)


def covers(rates: Rates, subject: PlanSubject) -> bool:
    """Whether the rates hold what a forecast of this model needs."""
    return not unmeasured(rates, subject)


def unmeasured(rates: Rates, subject: PlanSubject) -> list[str]:
    """In words, what a forecast of this model needs and the rates lack: its family's layers, its experts' format."""
    family, format = subject.config.family, subject.expert_format
    lacking = [] if family in rates.layers else [f"the layers of {family}"]
    return lacking if format in rates.kernels.experts else [*lacking, f"experts in {format}"]


def find_places(plan: ResolvedPlan) -> Places:
    """Where uniform picks find their experts. The page cache is taken as warm, as far as RAM can hold the file."""
    total = plan.shape.total_experts
    in_ram = (
        max(plan.num_ram_experts, plan.num_slots) if plan.mode == "arena" else plan.num_ram_experts + plan.num_slots
    )
    outside = max(0, total - min(total, in_ram))
    room = max(0, plan.request.ram_bytes - plan.ram_bytes)
    cached = 0.0 if plan.direct_reads else min(1.0, room / (outside * plan.stride)) if outside else 0.0
    buffers = lent_slots(plan.lent_bytes, plan.stride)
    lent = min(plan.ring_slots + buffers, plan.num_slots) if plan.ring_borrowed else 0
    ring = 0.0 if plan.ring_slots == 0 else 1 - (plan.num_slots - lent) / total
    return Places(1 - outside / total, outside / total * cached, outside / total * (1 - cached), ring, lent,
                  plan.mode == "mapped")  # fmt: skip


def interpolate(rates: Mapping[int, float], at: float) -> float:
    """The rate ``at`` a size between those measured, straight in logarithms; the first and last beyond them."""
    known = sorted(rates)
    if at <= known[0]:
        return rates[known[0]]
    for low, high in pairwise(known):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(rates[low]) + share * math.log(rates[high]))
    return rates[known[-1]]


def rate_of(rates: Mapping[int, ByRows], work: float, rows: float) -> float:
    """The rate for so many multiply-adds a row and so many rows."""
    return interpolate({size: interpolate(by_rows, rows) for size, by_rows in rates.items()}, work)


def read_seconds(costs: Mapping[int, ByRows], blob_bytes: int, number: float) -> float:
    """What ``number`` experts of ``blob_bytes`` cost, straight between the numbers and sizes that were measured."""
    sizes = sorted(costs)
    known = [(size, _between({0: 0.0, **costs[size]}, number)) for size in (sizes[0], sizes[-1])]
    return max(0.0, _between(dict(known), blob_bytes))


def _between(known: Mapping[int, float], at: float) -> float:
    """The value at ``at`` on the line through its two neighbours; outside of all, through the nearest two."""
    places = sorted(known)
    above = next((index for index, place in enumerate(places) if at <= place), len(places) - 1)
    low, high = places[max(0, above - 1)], places[max(1, above)]
    return known[low] + (at - low) / (high - low) * (known[high] - known[low])


def chances(picked: int, share: float) -> list[tuple[int | float, float]]:
    """How many of ``picked`` experts are read, each with chance ``share``, and how likely that is; of many the mean."""
    if picked > MANY_PICKS:
        return [(picked * share, 1.0)]
    return [(n, math.comb(picked, n) * share**n * (1 - share) ** (picked - n)) for n in range(picked + 1)]


@dataclass(frozen=True)
class _Arithmetic:
    subject: PlanSubject
    plan: ResolvedPlan
    rates: Rates
    costs: LayerCosts
    places: Places

    def token(self, context: int) -> dict[str, float]:
        """Seconds of one decode round of one row by part."""
        shape, layers = self.plan.shape, self.subject.config.num_layers
        experts = layers * shape.top_k * self._expert(1)
        state = 2 * shape.state_bytes / self.rates.bandwidths.memory_read
        return {
            "dense": sum(self._product(matrix, 1) for matrix in self.subject.matrices),
            "experts": experts,
            "experts from the file": self._waiting(shape.top_k, experts),
            "attention and state": self._mixing(context, 1) + state,
            "launches": layers * self.costs.a_round,
        }

    def chunk(self, first: int, rows: int) -> dict[str, float]:
        """Seconds of a prompt's chunk of ``rows`` rows at position ``first`` by part."""
        shape, layers, memory = self.plan.shape, self.subject.config.num_layers, self.rates.bandwidths
        picked = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** rows)
        experts = layers * picked * self._expert(rows * shape.top_k / picked)
        vectors = layers * VECTOR_PASSES * 4 * shape.hidden * rows / memory.memory_read
        a_row = self.costs.a_row + shape.top_k * self.costs.a_pick
        through_ring = rows > WINDOW_ROWS and self.places.ring > 0
        return {
            "dense": sum(self._product(matrix, rows) for matrix in self.subject.matrices),
            "experts": experts,
            "experts from the file": self._waiting(picked, experts),
            "moving experts": layers * picked * self.places.ring * self.a_load if through_ring else 0.0,
            "attention and state": self._mixing(first + rows // 2, rows),
            "launches": layers * (self.costs.a_round + rows * a_row) + vectors,
        }

    @property
    def a_load(self) -> float:
        """Seconds to move one expert into a slot: a device made of RAM copies in the thread that asks for it, and what
        is not page-locked is staged first. Who copies does not compute, so that times add up."""
        memory, blob = self.rates.bandwidths, self.plan.shape.blob_bytes
        staged = blob / memory.memory_copy if self.plan.request.pin.rule == "none" else 0.0
        return blob / memory.single_copy + staged + self.costs.a_load

    def _expert(self, rows: float) -> float:
        """Seconds of one expert with so many rows. One row is bound by memory, which small pages of a mapped file slow
        down."""
        rates, memory = self.rates.kernels.experts[self.subject.expert_format], self.rates.bandwidths
        work = 3 * self.subject.layout.hidden * self.subject.layout.intermediate
        reading = work / rate_of(rates, work, 1)
        if self.places.mapped and memory.mapped_read is not None:
            reading *= max(1.0, memory.memory_read / memory.mapped_read)
        return max(reading, rows * work / rate_of(rates, work, rows))

    def _waiting(self, picked: float, computing: float) -> float:
        """Seconds that all layers wait for files, when each picked so many experts and they compute so long in all.

        What was measured holds the computing of a row of what is read. Besides, what lies in memory is computed
        meanwhile, and more rows of what the drive brought earlier: while the drive reads, and beside copies from the
        page cache by the processors that do not copy.
        """
        places, layers = self.places, self.subject.config.num_layers
        if places.mapped:  # the processor stands still while a page is fetched
            memory = self.rates.bandwidths
            rate = memory.drive_pieces or memory.memory_copy
            return layers * picked * places.drive * self.plan.shape.blob_bytes / rate
        copying = layers * self._reading(picked, places.cached, past_cache=False)
        reading = layers * self._reading(picked, places.drive, past_cache=True)
        readers, num_cpus = self.plan.stager.num_threads, max(1, self.plan.request.num_cpus)
        idle = 1 - min(readers, num_cpus) / num_cpus
        # Of what the drive brings, all but the first turn of readers arrives while earlier experts are computed.
        later = max(0.0, 1 - readers / max(1.0, picked * places.drive))
        more_rows = max(0.0, computing - layers * picked * self._expert(1))
        beside = computing * places.memory + min(more_rows * places.drive, reading) * later
        return copying + reading - min(beside, reading + idle * copying)

    def _reading(self, picked: float, share: float, *, past_cache: bool) -> float:
        """Expected seconds of a layer for a file, when each of so many experts is in it with chance ``share``."""
        blob, file = self.plan.shape.blob_bytes, self.rates.file
        if file is None or share == 0:
            return picked * share * blob / self.rates.bandwidths.memory_copy
        costs = file.drive if past_cache and file.drive is not None else file.cached
        return sum(chance * read_seconds(costs, blob, n) for n, chance in chances(round(picked), share))

    def _mixing(self, positions: int, rows: int) -> float:
        """Seconds of attention and recurrent states for ``rows`` rows with so many positions before them."""
        rate = rate_of(self.rates.kernels.attention, self.subject.config.head_width, rows)
        return rows * self.subject.config.mixing_work(positions) / rate

    def _product(self, matrix: DenseMatrix, rows: int) -> float:
        """Seconds of a product; of the head (as many rows as the vocabulary) a prompt needs the last row alone."""
        needed = 1 if matrix.rows == self.subject.config.vocabulary else rows
        rate = rate_of(self.rates.kernels.linear[matrix.format], matrix.rows * matrix.columns, needed)
        return needed * matrix.rows * matrix.columns / rate
