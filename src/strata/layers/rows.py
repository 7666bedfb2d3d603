"""What a forward's rows are: where they start, their rotary values, and whether they are certain.

Lives in ``layers`` as the one argument that every layer of a forward shares. It must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.layers.rope import RopeTable

__all__ = ["Rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """T consecutive tokens from position ``start``. ``certain``: all will be committed (a prompt), so recurrent
    state may advance with them; otherwise they are a window whose tail may be rejected."""

    ids: Sequence[int]
    start: int
    certain: bool
    rope: RopeTable
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
