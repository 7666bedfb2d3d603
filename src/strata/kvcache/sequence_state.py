"""SequenceState: everything one conversation keeps between forwards, moved forward by commit alone.

Lives in ``kvcache``; a family says which parts each of its layers has, this file says how they move together. It must
not know models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from strata.errors import EngineError, RequestError
from strata.kvcache.attention_cache import AttentionCache
from strata.kvcache.parts import GatherRows, RotaryTable
from strata.kvcache.recurrent_state import ConvolutionTail, DeltaState, SavedDelta, TokenHistory

__all__ = ["Checkpoint", "NgramState", "SequenceState"]


class NgramState:
    """What an n-gram embedding keeps: the last token ids and its convolution's tail."""

    def __init__(self, history: TokenHistory, tail: ConvolutionTail) -> None:
        self.history = history
        self.tail = tail

    def embedded(self, gather: GatherRows, ids: Sequence[int], width: int) -> torch.Tensor:
        """``gather`` of the rows' window; records the ids."""
        embedded = gather(self.history.windows(ids))
        assert embedded.shape[-1] == width, "a table's rows are as wide as the projections that read them"
        self.history.record(ids)
        return embedded

    def commit(self, accepted: int) -> None:
        self.history.commit(accepted)
        self.tail.commit(accepted)

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state that cannot be rewound, copied at one length; keys and values stay where they are."""

    length: int
    deltas: Mapping[int, SavedDelta]
    ngrams: Mapping[int, tuple[tuple[int, ...], torch.Tensor]]


class SequenceState:
    """One sequence of up to ``max_positions`` tokens.

    ``length`` is the number of committed positions. A forward starts at ``begin`` and leaves recorded rows;
    ``commit(n)`` accepts the first n of them, and a forward without a commit is forgotten by the next ``begin``.
    """

    def __init__(
        self,
        max_positions: int,
        attention: Mapping[int, AttentionCache],
        delta: Mapping[int, DeltaState] | None = None,
        ngram: Mapping[int, NgramState] | None = None,
    ) -> None:
        self.sequences = 1
        self.max_positions = max_positions
        self.attention = attention
        self.delta = delta or {}
        self.ngram = ngram or {}
        self.length = 0
        self._recorded = 0
        self._written = False

    def begin(self, rows: int, *, certain: bool = False) -> int:
        """Starts a forward of ``rows`` rows; returns the position of the first. With ``certain`` the recurrent state
        advances during the forward, so a commit of exactly these rows must follow.

        Raises ``RequestError`` when the rows do not fit and ``EngineError`` when a certain forward was left unfinished.
        """
        if self._written:
            raise EngineError(
                f"the sequence state at position {self.length} was left half advanced by a failed prompt chunk",
                "start the sequence again from a new state",
            )
        if rows < 1 or self.length + rows > self.max_positions:
            raise RequestError(
                f"{rows} rows at position {self.length} do not fit a context of {self.max_positions} positions",
                "shorten the prompt or raise --max-context",
            )
        self._recorded = rows
        self._written = certain
        return self.length

    def rotary(self, table: RotaryTable) -> RotaryTable:
        return table

    def commit(self, accepted: int) -> None:
        """Accepts the first ``accepted`` rows of the last forward and forgets the others."""
        assert 0 <= accepted <= self._recorded, (accepted, self._recorded)
        assert not self._written or accepted == self._recorded, "a certain forward is committed whole"
        for delta in self.delta.values():
            delta.commit(accepted)
        for ngram in self.ngram.values():
            ngram.commit(accepted)
        self.length += accepted
        self._recorded = 0
        self._written = False

    def checkpoint(self) -> Checkpoint:
        """Copies what cannot be rewound (between rounds only). Cost: ``recurrent_bytes``."""
        assert self._recorded == 0, "a checkpoint is taken after commit"
        return Checkpoint(
            self.length,
            {layer: part.save() for layer, part in self.delta.items()},
            {layer: (part.history.ids, part.tail.rows_UC.clone()) for layer, part in self.ngram.items()},
        )

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Returns to a checkpoint of this same sequence; keys and values before its length are still in place."""
        for layer, saved in checkpoint.deltas.items():
            self.delta[layer].restore(saved)
        for layer, (ids, tail) in checkpoint.ngrams.items():
            self.ngram[layer].history.ids = ids
            self.ngram[layer].tail.rows_UC = tail.clone()
        self.length = checkpoint.length
        self._recorded = 0
        self._written = False

    def pretend(self, length: int) -> None:
        """Takes a sequence of ``length`` made-up tokens as read: keys and values are random, recurrent state is empty.

        For measuring rounds at a long position without reading a prompt of that length.
        """
        assert 0 <= length <= self.max_positions, (length, self.max_positions)
        for layer, part in self.attention.items():
            part.fill_randomly(length, layer)
        self.length = length
        self._recorded = 0
        self._written = False

    def truncate(self, length: int) -> None:
        """Takes committed positions back. Only for a state that has nothing but attention."""
        assert not self.delta, "recurrent state cannot be rewound"
        assert not self.ngram, "recurrent state cannot be rewound"
        assert length <= self.length
        self.length = length
        self._recorded = 0
        self._written = False

    @property
    def recurrent_bytes(self) -> int:
        return sum(part.nbytes for part in self.delta.values()) + sum(part.nbytes for part in self.ngram.values())

    @property
    def nbytes(self) -> int:
        return self.recurrent_bytes + sum(part.nbytes for part in self.attention.values())
