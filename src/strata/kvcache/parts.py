"""What a layer may ask of its state: the protocols that decode states and training states share.

Lives in ``kvcache`` beside both. It must not know models or layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from strata.kernels.ops import DeltaRows

__all__ = [
    "AttentionPart",
    "DeltaPart",
    "GatherRows",
    "IndexPart",
    "NgramPart",
    "RotaryTable",
    "StateParts",
    "TailPart",
]


class GatherRows(Protocol):
    """See ``layers.ngram.NgramEmbedding.gather``."""

    def __call__(self, windows: list[list[int]], out_TX: torch.Tensor | None = None) -> torch.Tensor:
        """From windows of token ids (a list a sequence, with the ids that precede the rows) to the rows' embeddings."""


class RotaryTable(Protocol):
    """See ``layers.rope.RopeTable``."""

    def rows(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def at(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]: ...


class IndexPart(Protocol):
    """See ``IndexCache``. ``selects_always``: nobody knows yet how many blocks there are, so queries are projected
    whether they are needed or not."""

    block: int
    selects_always: bool

    def append(self, start: int, raw_TD: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]: ...

    def finish(self, start: int, rows: int, key_BD: torch.Tensor) -> tuple[int, torch.Tensor]: ...


class AttentionPart(Protocol):
    """See ``AttentionCache``."""

    @property
    def index(self) -> IndexPart | None: ...

    def append(self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class TailPart(Protocol):
    """See ``ConvolutionTail``."""

    rows_UC: torch.Tensor

    def record(self, x_TC: torch.Tensor, *, certain: bool) -> None: ...


class DeltaPart(Protocol):
    """See ``DeltaState``."""

    state_NDV: torch.Tensor
    pending: DeltaRows | None

    @property
    def tail(self) -> TailPart: ...

    def record(self, qkv_TC: torch.Tensor, rows: DeltaRows, *, written: bool) -> None: ...


class NgramPart(Protocol):
    """See ``NgramState``."""

    def embedded(self, gather: GatherRows, ids: Sequence[int], width: int) -> torch.Tensor:
        """``gather`` of the rows' windows, T x width; records the ids."""

    @property
    def tail(self) -> TailPart: ...


class StateParts(Protocol):
    """See ``SequenceState``: what a model's forward needs of it."""

    @property
    def sequences(self) -> int: ...

    @property
    def attention(self) -> Mapping[int, AttentionPart]: ...

    @property
    def delta(self) -> Mapping[int, DeltaPart]: ...

    @property
    def ngram(self) -> Mapping[int, NgramPart]: ...

    def begin(self, rows: int, *, certain: bool = False) -> int: ...

    def rotary(self, table: RotaryTable) -> RotaryTable:
        """The table that gives the rows' rotary values."""
