"""What a router did, from counts: skew, how many experts occurred, what a row shares with the row before.

Lives in ``engine`` because it reads what a runtime counted. Pure arithmetic: it must not know how the picks came about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.checkpoint.synthetic_routing import HOT_SHARE

__all__ = ["WINDOW", "RoutingCounts", "count_routing"]

WINDOW = 512  # rows in which most experts should occur


@dataclass(frozen=True)
class RoutingCounts:
    """Means over layers. ``hot_picks``: share of picks that the most picked ``HOT_SHARE`` of a layer's experts took;
    ``distinct``: share of a layer's experts picked in ``WINDOW`` rows, None for fewer rows; ``repeats``: share of a
    row's picks that the row before has too."""

    rows: int
    hot_picks: float
    distinct: float | None
    repeats: float

    def line(self) -> str:
        distinct = "" if self.distinct is None else f"{100 * self.distinct:.1f} % occur in {WINDOW} tokens, "
        return (
            f"routing, counted over {self.rows:,} tokens: the top {100 * HOT_SHARE:.0f} % of experts take "
            f"{100 * self.hot_picks:.1f} % of the picks, {distinct}{100 * self.repeats:.1f} % of a row's picks repeat "
            "the row before's"
        )


def count_routing(picked: NDArray[np.bool_]) -> RoutingCounts:
    """``picked`` [rows, layers, experts]: whether a row picked an expert; two rows at least."""
    rows, _, num_experts = picked.shape
    assert rows > 1, "sharing is between rows"
    hot = max(1, round(HOT_SHARE * num_experts))
    counts = np.sort(picked.sum(0), axis=1)[:, ::-1]
    per_row = picked.sum() / rows
    distinct = float(picked[:WINDOW].any(0).mean()) if rows >= WINDOW else None
    shared = float((picked[1:] & picked[:-1]).sum() / (rows - 1) / per_row)
    return RoutingCounts(rows, float((counts[:, :hot].sum(1) / counts.sum(1)).mean()), distinct, shared)
