"""Which experts deserve which place: pure functions over counts, tested and simulated without memory or torch.

Lives in ``experts`` because it ranks experts. ``heat`` is a [layers, experts] table of how often each expert is picked
(a profile, or decayed counts of the running conversation). Ties are defined, so that equal inputs give equal
placements on every machine. It must not copy or own anything.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DECAY", "Swap", "choose_swaps", "decay_counts", "rank_experts", "split_pinned"]

Heat = NDArray[np.float64]

DECAY = 0.9  # weight of the past at each adaptation: half of it is forgotten after seven
# A newcomer must be picked this much more often than the one it replaces, or two equals would swap for ever.
HYSTERESIS_RATIO = 1.25
HYSTERESIS_PICKS = 1.0


class Swap(NamedTuple):
    """Promote one expert into VRAM in place of another of the same layer; flat numbers."""

    promoted: int
    victim: int


def rank_experts(heat: Heat) -> NDArray[np.int64]:
    """Flat numbers, hottest first. Ties: lower expert number, then lower layer: equal heat fills layers evenly."""
    layer, expert = np.divmod(np.arange(heat.size), heat.shape[1])
    return np.lexsort((layer, expert, -heat.ravel())).astype(np.int64)


def decay_counts(counts: Heat, fresh: NDArray[np.int64]) -> Heat:
    """Counts after an adaptation: the past decays, the picks since then are added."""
    return counts * DECAY + fresh


def choose_swaps(heat: Heat, in_vram: NDArray[np.bool_], max_swaps: int, draft_layers: int = 0) -> list[Swap]:
    """The most useful exchanges, best first: in each layer the hottest outside VRAM against the coldest inside.

    Every expert occurs once at most, and the number of slots of a layer never changes. The last ``draft_layers`` get
    what the others leave: a chain of drafts picks several times a round, and would win every comparison.
    """
    if max_swaps <= 0:
        return []
    found: list[tuple[bool, float, int, Swap]] = []
    num_experts = heat.shape[1]
    inside = np.where(in_vram, heat, np.inf)
    outside = np.where(in_vram, -np.inf, heat)
    coldest_of, hottest_of = _lowest(inside, max_swaps), _lowest(-outside, max_swaps)
    for layer in range(heat.shape[0]):
        for cold, hot in zip(coldest_of[layer], hottest_of[layer], strict=False):  # as many as both have
            gain = float(outside[layer, hot] - inside[layer, cold])
            if outside[layer, hot] < inside[layer, cold] * HYSTERESIS_RATIO or gain < HYSTERESIS_PICKS:
                break
            is_draft = layer >= heat.shape[0] - draft_layers
            found.append((is_draft, -gain, layer, Swap(layer * num_experts + hot, layer * num_experts + cold)))
    return [swap for *_, swap in sorted(found)[:max_swaps]]


def _lowest(values: Heat, count: int) -> list[list[int]]:
    """Of each row the columns of its ``count`` lowest values, rising; ties: the lower column. Infinite ones are left
    out. A conversation waits for this between two rounds: no row is sorted whole."""
    count = min(count, values.shape[1])
    bound = np.partition(values, count - 1, axis=1)[:, count - 1 : count]
    row, column = np.nonzero((values <= bound) & np.isfinite(values))
    order = np.lexsort((column, values[row, column], row))
    row, column = row[order], column[order]
    starts = np.searchsorted(row, np.arange(len(values) + 1))
    return [column[start : min(stop, start + count)].tolist() for start, stop in pairwise(starts.tolist())]


def split_pinned(num_pinned: int, num_cpu: int, fraction: float, *, balance: bool = True) -> int:
    """How many of a round's ``num_pinned`` page-locked misses the device reads over the link itself.

    A pure function of the lists: with ``balance``, ``fraction`` of all misses (``num_cpu`` others must be computed by
    the CPU), so that link and CPU end together whatever is not page-locked; without, of the page-locked ones alone.
    The number of whole experts with which whoever ends later, the link at ``fraction`` of both rates or the CPU at the
    rest, ends earliest: one goes to the link while ``taken / fraction <= (shared - taken + 1) / (1 - fraction)``.
    """
    shared = num_pinned + num_cpu if balance else num_pinned
    return min(num_pinned, int((shared + 1) * fraction))
