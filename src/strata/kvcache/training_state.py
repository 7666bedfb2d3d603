"""TrainingState: stands in for a ``SequenceState`` where whole sequences are trained on and nothing is kept.

Lives in ``kvcache`` because it has the parts of a ``SequenceState`` with their meaning for ``TrainingOps``: keys and
values pass straight through, so gradients do too, and all state is that of an empty sequence. A batch is B sequences
of equal length laid one after another. It must not know models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from strata.kernels.ops import DeltaRows
from strata.kvcache.parts import GatherRows, RotaryTable

__all__ = ["PassingCache", "PassingDelta", "PassingIndex", "PassingNgram", "TrainingState"]

_EMPTY = torch.empty(0)


class PassingIndex:
    """Index keys of B sequences, blocks laid sequence after sequence."""

    selects_always = False

    def __init__(self, sequences: int, block: int) -> None:
        self.block = block
        self._sequences = sequences

    def append(self, start: int, raw_TD: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]:
        """As ``IndexCache.append``, for all sequences at once."""
        length = raw_TD.shape[0] // self._sequences
        blocks = length // self.block
        raw = raw_TD.view(self._sequences, length, -1)[:, : blocks * self.block]
        return list(range(0, blocks * self.block, self.block)) * self._sequences, raw.reshape(
            self._sequences * blocks, self.block, -1
        )

    def finish(self, start: int, rows: int, key_BD: torch.Tensor) -> tuple[int, torch.Tensor]:
        return rows // self._sequences // self.block, key_BD


class PassingCache:
    """Hands keys and values on as they are."""

    def __init__(self, index: PassingIndex | None = None) -> None:
        self.index = index

    def append(self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k_TGD, v_TGD


class _PassingTail:
    rows_UC = _EMPTY

    def record(self, x_TC: torch.Tensor, *, certain: bool) -> None:
        """Nothing is kept."""


class PassingDelta:
    """An empty delta net state: ``TrainingOps`` reads none of it."""

    state_NDV = _EMPTY
    pending: DeltaRows | None = None
    tail = _PassingTail()

    def record(self, qkv_TC: torch.Tensor, rows: DeltaRows, *, written: bool) -> None:
        """Nothing is kept."""


class PassingNgram:
    """Token windows that restart with every sequence of the batch."""

    def __init__(self, sequences: int, length: int, fill: int) -> None:
        self._sequences = sequences
        self._before = [fill] * length
        self.tail = _PassingTail()

    def embedded(self, gather: GatherRows, ids: Sequence[int], width: int) -> torch.Tensor:
        length = len(ids) // self._sequences
        return gather([[*self._before, *ids[i : i + length]] for i in range(0, len(ids), length)])


class TrainingState:
    """The parts of a batch, by layer, as ``SequenceState`` has them for one sequence."""

    length = 0

    def __init__(
        self,
        sequences: int,
        attention: Mapping[int, PassingCache],
        delta: Mapping[int, PassingDelta] | None = None,
        ngram: Mapping[int, PassingNgram] | None = None,
    ) -> None:
        self.sequences = sequences
        self.attention = attention
        self.delta = delta or {}
        self.ngram = ngram or {}

    def begin(self, rows: int, *, certain: bool = False) -> int:
        assert rows % self.sequences == 0, f"{rows} rows are not {self.sequences} sequences of equal length"
        return 0

    def rotary(self, table: RotaryTable) -> RotaryTable:
        return table
