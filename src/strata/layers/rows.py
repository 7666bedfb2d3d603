"""What a forward's rows are: where they start, their rotary values, and whether they are certain.

Lives in ``layers`` as the one argument that every layer of a forward shares. It must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.kvcache.parts import RotaryTable, StateParts

__all__ = ["Rows", "take_rows", "wanted_rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """T consecutive tokens from position ``start``. ``certain``: all will be committed (a prompt), so recurrent
    state may advance with them; otherwise they are a window whose tail may be rejected."""

    ids: Sequence[int]
    start: int
    certain: bool
    rope: RotaryTable
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


def take_rows(table: RotaryTable, ids: Sequence[int], state: StateParts, *, certain: bool) -> Rows:
    """Begins a forward of ``ids`` on the state. The rows of every sequence of a training batch start at position 0."""
    start = state.begin(len(ids), certain=certain)
    rope = state.rotary(table)
    length = len(ids) // state.sequences
    cos_TR, sin_TR = rope.rows(start, length)
    if state.sequences > 1:
        cos_TR, sin_TR = cos_TR.repeat(state.sequences, 1), sin_TR.repeat(state.sequences, 1)
    return Rows(ids, start, certain, rope, cos_TR, sin_TR)


def wanted_rows(x: torch.Tensor, wanted: str | int) -> torch.Tensor:
    """All rows, the last one, or that of a number, as a view."""
    if wanted == "all":
        return x
    last = x.shape[0] - 1 if wanted == "last" else int(wanted)
    return x[last : last + 1]
