"""One sequence of tokens as a session acts on it: the same calls whether the CPU computes or a card does.

Lives in ``engine`` below ``session``. It must not know a family, a tier or a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from strata.engine.cancellation import CancellableExperts, Cancellation

if TYPE_CHECKING:
    import torch

    from strata.kernels.ops import ExpertExecutor, Ops
    from strata.kvcache.sequence_state import SequenceState
    from strata.models.family import LogitRows, Model

__all__ = ["HostSequence", "TokenSequence"]


class TokenSequence(Protocol):
    """Holds the state of one conversation. One thread uses it."""

    @property
    def alive(self) -> bool:
        """False once another sequence has taken the memory that this one's state was in."""

    @property
    def lends(self) -> bool:
        """Whether the logits of ``forward`` lie in memory that the next call overwrites."""

    @property
    def chunk_rows(self) -> int | None:
        """Of the prompt that is being read, where the sequence chooses them: no row's bits depend on its chunk."""

    def forward(
        self, ids: Sequence[int], logits: LogitRows, cancellation: Cancellation | None, *, certain: bool
    ) -> torch.Tensor | None:
        """FP32 logits of all rows, of the last, or None. Rows are recorded; see ``commit``. ``certain``: all of them
        will be committed."""

    def best_ids(self, ids: Sequence[int], cancellation: Cancellation | None) -> list[int]:
        """A window as ``forward`` runs it, without logits: of each row the lowest id among the largest; -1 where a
        logit is NaN or the largest is not finite."""

    def prompt(self, ids: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, ``forward`` is given these rows, chunk after chunk, all of them certain."""

    def commit(self, num_rows: int) -> None:
        """Accepts the first ``num_rows`` recorded rows and forgets the others."""

    def reset(self) -> None:
        """Forgets everything."""

    def pretend(self, length: int) -> None:
        """Takes so many made-up tokens as read (``SequenceState.pretend``)."""


class HostSequence:
    """On the CPU: the model's own forward over a ``SequenceState``."""

    alive = True
    lends = False
    chunk_rows = None

    def __init__(self, model: Model, ops: Ops, experts: ExpertExecutor, new_state: Callable[[], SequenceState]) -> None:
        self._model, self._ops, self._experts, self._new_state = model, ops, experts, new_state
        self._state = new_state()

    def forward(
        self, ids: Sequence[int], logits: LogitRows, cancellation: Cancellation | None, *, certain: bool
    ) -> torch.Tensor | None:
        experts = CancellableExperts(self._experts, cancellation) if cancellation else self._experts
        return self._model.forward(self._ops, list(ids), self._state, experts, logits, certain=certain)

    def best_ids(self, ids: Sequence[int], cancellation: Cancellation | None) -> list[int]:
        logits_TV = self.forward(ids, "all", cancellation, certain=False)
        assert logits_TV is not None
        best = self._ops.argmax(logits_TV)
        return [id_ if id_ >= 0 and math.isfinite(logits_TV[row, id_]) else -1 for row, id_ in enumerate(best)]

    def prompt(self, ids: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def commit(self, num_rows: int) -> None:
        self._state.commit(num_rows)

    def reset(self) -> None:
        self._state = self._new_state()

    def pretend(self, length: int) -> None:
        self.reset()
        self._state.pretend(length)
