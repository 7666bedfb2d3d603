"""What each policy would have hit: a recorded run of picks against a number of slots, without moving a byte.

Lives in ``experts`` beside ``policy``, whose functions it plays. A trace is int [rounds, layers, top_k]: the experts
that each decode round picked. Every simulation counts the picks that find their expert in a slot when they come.
It must not know a model, memory or torch.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from strata.experts.policy import Heat, choose_swaps, decay_counts, rank_experts

__all__ = ["POLICIES", "CacheRun", "Trace", "count_picks", "simulate"]

Trace = NDArray[np.int64]


@dataclass(frozen=True)
class CacheRun:
    """``loads``: experts copied into a slot after the start, which is what a policy costs."""

    hits: int
    picks: int
    loads: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.picks if self.picks else 0.0


def count_picks(trace: Trace, num_experts: int) -> NDArray[np.int64]:
    """[layers, experts]: how often each expert was picked."""
    layers = np.arange(trace.shape[1])[None, :, None]
    flat = np.broadcast_to(layers * num_experts, trace.shape) + trace
    return np.bincount(flat.ravel(), minlength=trace.shape[1] * num_experts).reshape(trace.shape[1], num_experts)


def profile(trace: Trace, heat: Heat, num_slots: int, adapt_every: int, adapt_swaps: int) -> CacheRun:
    """The hottest of the profile, never exchanged."""
    inside = _start(heat, num_slots)
    return CacheRun(int(inside[_flat(trace, heat)].sum()), trace.size, 0)


def decayed_counts(trace: Trace, heat: Heat, num_slots: int, adapt_every: int, adapt_swaps: int) -> CacheRun:
    """The engine's own policy: the profile at the start, then ``choose_swaps`` over decayed counts."""
    inside, flat, counts = _start(heat, num_slots), _flat(trace, heat), heat.copy()
    hits = loads = 0
    every = max(1, adapt_every)
    for first in range(0, len(trace), every):
        part = flat[first : first + every]
        hits += int(inside[part].sum())
        fresh = np.bincount(part.ravel(), minlength=heat.size).reshape(heat.shape)
        counts = decay_counts(counts, fresh)
        for swap in choose_swaps(counts, inside.reshape(heat.shape), adapt_swaps):
            inside[swap.promoted], inside[swap.victim] = True, False
            loads += 1
    return CacheRun(hits, trace.size, loads)


def least_recent(trace: Trace, heat: Heat, num_slots: int, adapt_every: int, adapt_swaps: int) -> CacheRun:
    """Every miss takes the slot of the expert that was not picked for the longest time."""
    ranked = rank_experts(heat)[:num_slots].tolist()
    slots: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(ranked))
    hits = loads = 0
    for expert in _flat(trace, heat).ravel().tolist() if num_slots else ():
        if expert in slots:
            slots.move_to_end(expert)
            hits += 1
            continue
        slots.popitem(last=False)
        slots[expert] = None
        loads += 1
    return CacheRun(hits, trace.size, loads)


def clairvoyant(trace: Trace, heat: Heat, num_slots: int, adapt_every: int, adapt_swaps: int) -> CacheRun:
    """No policy hits more: it knows the future, and a miss is only kept where it comes back first."""
    flat = _flat(trace, heat).ravel().tolist()
    uses: defaultdict[int, deque[int]] = defaultdict(deque)
    for when, expert in enumerate(flat):
        uses[expert].append(when)
    never = len(flat)

    def next_use(expert: int) -> int:
        return uses[expert][0] if uses[expert] else never

    slots = {expert: next_use(expert) for expert in sorted(range(heat.size), key=next_use)[:num_slots]}
    latest = [(-use, expert) for expert, use in slots.items()]  # a heap; entries of the past are passed over
    heapify(latest)
    hits = loads = 0
    for expert in flat:
        uses[expert].popleft()
        use = next_use(expert)
        if expert in slots:
            hits += 1
        elif slots:
            while slots.get(latest[0][1]) != -latest[0][0]:
                heappop(latest)
            if use >= -latest[0][0]:
                continue
            del slots[heappop(latest)[1]]
            loads += 1
        else:
            continue
        slots[expert] = use
        heappush(latest, (-use, expert))
    return CacheRun(hits, trace.size, loads)


POLICIES: dict[str, Callable[[Trace, Heat, int, int, int], CacheRun]] = {
    "profile": profile,
    "lru": least_recent,
    "decayed": decayed_counts,
    "clairvoyant": clairvoyant,
}
"""By the name that a figure has. All start from the same slots but the clairvoyant, who knows better ones."""


def simulate(
    policy: str, trace: Trace, heat: Heat, num_slots: int, *, adapt_every: int = 8, adapt_swaps: int = 4
) -> CacheRun:
    """One policy over a trace. ``heat`` [layers, experts] is the profile; ``num_slots`` at most all experts."""
    assert trace.ndim == 3
    assert trace.shape[1] == heat.shape[0], "a trace has the profile's layers"
    assert 0 <= num_slots <= heat.size
    return POLICIES[policy](trace, heat, num_slots, adapt_every, adapt_swaps)


def _flat(trace: Trace, heat: Heat) -> NDArray[np.int64]:
    """Flat numbers [rounds, layers, top_k]."""
    first: Trace = (np.arange(heat.shape[0]) * heat.shape[1])[None, :, None]
    return np.add(trace, first)


def _start(heat: Heat, num_slots: int) -> NDArray[np.bool_]:
    inside = np.zeros(heat.size, np.bool_)
    inside[rank_experts(heat)[:num_slots]] = True
    return inside
