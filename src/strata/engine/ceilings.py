"""The bound of a decode round: the bytes that it reads over measured rates, and its launches over theirs.

Lives in ``engine`` because it joins what a runtime holds and counts with the rates of RAM, VRAM and link. The bound is
arithmetic; the rates are measured once at the start. Issue: a round is the sum over layers of dense and state bytes,
then the slower of hits from VRAM and misses over CPU and link together, then posting and waiting, then launches.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from strata.memory.bandwidth import measure_memory_read

if TYPE_CHECKING:
    from strata.engine.runtime import Runtime

__all__ = ["Ceilings", "RoundBytes", "measure_ceilings", "median_ceilings", "round_seconds"]

POST_AND_WAIT_SECONDS = 3.6e-6  # of a layer inside a captured graph: a ceiling, measured on an H200
GIGA = 1e9


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second. Without a card ``vram``, ``link`` and ``launch_seconds`` are None: RAM is all there is.

    ``both``: CPU and link reading RAM at once, measured so; None: taken as their sum.
    """

    ram: float
    vram: float | None = None
    link: float | None = None
    launch_seconds: float = 0.0
    num_launches: int = 0
    both: float | None = None

    @property
    def together(self) -> float:
        return self.ram + (self.link or 0.0) if self.both is None else self.both

    def lines(self) -> list[str]:
        found = [f"RAM {self.ram / GIGA:.1f} GB/s (read by all threads)"]
        if self.vram is not None:
            found.append(f"VRAM {self.vram / GIGA:,.0f} GB/s")
        if self.link is not None:
            found.append(f"link {self.link / GIGA:.1f} GB/s (page-locked, in pieces of an expert)")
        if self.both is not None:
            found.append(f"CPU and link at once {self.both / GIGA:.1f} GB/s")
        if self.num_launches:
            found.append(f"{self.num_launches:,} launches of {1e6 * self.launch_seconds:.2f} us")
        return ["measured: " + ", ".join(found)]


@dataclass(frozen=True)
class RoundBytes:
    """What a round of one row reads, bytes: ``dense`` with recurrent state and keys, experts by where they lie."""

    dense: float
    hits: float
    misses: float
    num_layers: int

    def line(self) -> str:
        return (
            f"bytes a token: dense and state {self.dense / GIGA:.3f} GB, experts from slots {self.hits / GIGA:.3f} GB, "
            f"from elsewhere {self.misses / GIGA:.3f} GB"
        )


def round_seconds(ceilings: Ceilings, read: RoundBytes) -> float:
    """The bound of one round. On the CPU slots are RAM as all else is."""
    if ceilings.vram is None:
        return (read.dense + read.hits + read.misses) / ceilings.ram
    experts = max(read.hits / ceilings.vram, read.misses / ceilings.together)
    waiting = read.num_layers * POST_AND_WAIT_SECONDS if read.misses else 0.0
    return read.dense / ceilings.vram + experts + waiting + ceilings.num_launches * ceilings.launch_seconds


def median_ceilings(runs: Sequence[Mapping[str, float]]) -> Ceilings:
    """Those that the runs were measured beside, kept with each by the names of the fields."""
    found: dict[str, Any] = {
        one.name: statistics.median(run[one.name] for run in runs)
        for one in fields(Ceilings)
        if all(one.name in run for run in runs)
    }
    return Ceilings(**found)


def measure_ceilings(runtime: Runtime) -> Ceilings:
    """Rates of this machine, and of the card that the runtime computes on."""
    ram = measure_memory_read()
    card = runtime.card_rates()
    if card is None:
        return Ceilings(ram)
    both = runtime.measure_together(measure_memory_read)
    return Ceilings(ram, card.vram, card.link, card.launch_seconds, runtime.num_launches, both)
