"""State that cannot be rewound: convolution tails, the delta net's matrix, the last token ids.

Lives in ``kvcache`` because recording, committing and folding are one protocol for every layer kind: a forward
*records* its rows, ``commit(n)`` accepts the first n of them, and what is accepted reaches the state of the delta net
when the next forward folds it (one pass over a large matrix instead of two). It must not know models.

Legend: T rows, U tail rows, C channels, N value heads, D key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strata.kernels.ops import DeltaRows

__all__ = ["ConvolutionTail", "DeltaState", "SavedDelta", "TokenHistory"]


class ConvolutionTail:
    """The last U inputs of a causal convolution, oldest first; zeros before the sequence starts."""

    def __init__(self, rows: int, channels: int, device: torch.device) -> None:
        self.rows_UC = torch.zeros(rows, channels, device=device)
        self._recorded: torch.Tensor | None = None
        self._skipped = 0

    def record(self, x_TC: torch.Tensor, *, certain: bool) -> None:
        """Remembers a forward's rows. A window's are borrowed until commit; of rows that are certain only the last U
        are copied, so that a long chunk is not held in every layer at once."""
        kept = self.rows_UC.shape[0]
        self._skipped = max(0, x_TC.shape[0] - kept) if certain else 0
        self._recorded = x_TC.detach()[self._skipped :].clone() if self._skipped else x_TC.detach()

    def commit(self, accepted: int) -> None:
        """Accepts the first rows of the record and forgets the rest."""
        if self._recorded is not None and accepted:
            kept, end = self.rows_UC.shape[0], accepted - self._skipped
            rows = torch.cat((self.rows_UC, self._recorded[max(0, end - kept) : end]))
            self.rows_UC = rows[rows.shape[0] - kept :].clone()
        self._recorded = None

    @property
    def nbytes(self) -> int:
        return self.rows_UC.nbytes


@dataclass(frozen=True, eq=False)
class SavedDelta:
    """A copy of one ``DeltaState`` between rounds."""

    state_NDV: torch.Tensor
    tail_UC: torch.Tensor
    pending: DeltaRows | None


class DeltaState:
    """Matrix state N x D x V (FP32), the convolution's tail, the rows accepted but not yet folded. Owns all three."""

    def __init__(
        self, value_heads: int, key_width: int, value_width: int, tail_rows: int, channels: int, device: torch.device
    ) -> None:
        self.state_NDV = torch.zeros(value_heads, key_width, value_width, device=device)
        self.tail = ConvolutionTail(tail_rows, channels, device)
        self.pending: DeltaRows | None = None
        self._recorded: DeltaRows | None = None

    def record(self, qkv_TC: torch.Tensor, rows: DeltaRows, *, written: bool) -> None:
        """Called once a forward, after ``gated_delta`` has folded ``pending``. ``written``: that call advanced the
        matrix by all rows itself, so all of them must be committed."""
        self.pending = None
        self._recorded = None if written else rows
        self.tail.record(qkv_TC, certain=written)

    def commit(self, accepted: int) -> None:
        self.tail.commit(accepted)
        if self._recorded is not None and accepted:
            self.pending = self._recorded.first(accepted)
        self._recorded = None

    def save(self) -> SavedDelta:
        return SavedDelta(self.state_NDV.clone(), self.tail.rows_UC.clone(), self.pending)

    def restore(self, saved: SavedDelta) -> None:
        self.state_NDV.copy_(saved.state_NDV)
        self.tail.rows_UC = saved.tail_UC.clone()
        self.pending = saved.pending
        self._recorded = None

    @property
    def nbytes(self) -> int:
        return self.state_NDV.nbytes + self.tail.nbytes


class TokenHistory:
    """The last ``length`` token ids of a sequence, padded with ``fill`` before its start."""

    def __init__(self, length: int, fill: int) -> None:
        self._fill = (fill,) * length
        self.ids: tuple[int, ...] = self._fill
        self._recorded: tuple[int, ...] = ()

    def windows(self, ids: Sequence[int]) -> list[list[int]]:
        """The rows' ids with what precedes them: one list a sequence, here one of ``length + len(ids)`` ids."""
        return [[*self.ids, *ids]]

    def record(self, ids: Sequence[int]) -> None:
        self._recorded = tuple(ids)

    def commit(self, accepted: int) -> None:
        kept = len(self.ids)
        self.ids = (*self.ids, *self._recorded[:accepted])[-kept:]
        self._recorded = ()

    def clear(self) -> None:
        """The start of a sequence again."""
        self.ids = self._fill
        self._recorded = ()
