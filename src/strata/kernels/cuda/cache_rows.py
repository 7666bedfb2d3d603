"""What a layer has handed to its caches while a round is recorded, and no launch has written yet.

Lives beside ``heads.cu``, whose one launch does an attention layer's writes: a sequence's state leaves them in
``Program.appended`` and ``Program.indexed``, the operations that come next take them up. It must not know models.

Legend: T rows, P positions, G key/value heads, D width, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["IndexRows", "KeyValueRows"]


@dataclass(frozen=True, eq=False)
class KeyValueRows:
    """Rows that go to the caches from the committed position on."""

    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    k_PGD: torch.Tensor
    v_PGD: torch.Tensor


@dataclass(frozen=True, eq=False)
class IndexRows:
    """Raw index keys that go to their cache, and the keys of the blocks that they complete."""

    raw_TD: torch.Tensor
    raw_PD: torch.Tensor
    key_BD: torch.Tensor
