"""One conversation: its tokens, the state they left in the model, the prompt path and the round.

Lives in ``engine`` because a session is what rounds act on. It knows the model only through
``forward``/``commit`` and the experts only as an executor: no tier, no family, no file.

A round records rows and commits those the caller accepts; nothing else ever changes the state, so a round
that fails or is cancelled can be repeated from where it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.engine.cancellation import Cancellation
from strata.errors import EngineError, RequestError

if TYPE_CHECKING:
    import torch

    from strata.engine.runtime import Runtime
    from strata.models.family import LogitRows

__all__ = ["Session", "SessionStatistics", "chunk_bounds"]


def chunk_bounds(start: int, end: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Cuts positions [start, end) at the multiples of ``chunk_rows``.

    Where a row's bits depend on its chunk, ``chunk_rows`` is a function of the option alone, never of free memory,
    cache size or other requests. On a card they do not (decision record 0131), and link and VRAM choose.
    """
    while start < end:
        stop = min(end, (start // chunk_rows + 1) * chunk_rows)
        yield start, stop
        start = stop


@dataclass(frozen=True)
class SessionStatistics:
    """Counts and seconds since the session began. ``rounds`` are decode rounds, of any window size."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    chunks: int = 0
    rounds: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0


class Session:
    """Owns one ``TokenSequence``. Not thread-safe: the scheduler gives it to one thread at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sequence = runtime.new_sequence()
        self.tokens: list[int] = []
        self._recorded: list[int] = []
        self._prompt_tokens = self._chunks = self._rounds = self._decode_tokens = 0
        self._prompt_seconds = self._decode_seconds = 0.0

    @property
    def length(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    def reset(self) -> None:
        """Forgets the conversation; the counters stay."""
        if self._sequence.alive:
            self._sequence.reset()
        else:
            self._sequence = self._runtime.new_sequence()
        self.tokens = []
        self._recorded = []

    def pretend(self, length: int) -> None:
        """Takes ``length`` made-up tokens as read, for measuring rounds at a long position without a prompt."""
        self.reset()
        self._sequence.pretend(length)
        self.tokens = [0] * length

    def keep_prefix_of(self, ids: Sequence[int]) -> int:
        """How many of ``ids`` need not be read again: all the session holds if ``ids`` goes on from it, else none.

        At least one id is always left to read, since its logits are wanted.
        """
        if self._sequence.alive and len(self.tokens) < len(ids) and self.tokens == list(ids[: len(self.tokens)]):
            return len(self.tokens)
        if self.tokens or not self._sequence.alive:
            self.reset()
        return 0

    def check_room(self, num_new: int) -> None:
        """Raises ``RequestError`` (400) naming both counts when ``num_new`` more tokens pass the context."""
        total, limit = self.length + num_new, self._runtime.max_context
        if total > limit:
            raise RequestError(
                f"the prompt has {total:,} tokens, the context holds {limit:,}",
                "shorten the prompt",
                code="context_length_exceeded",
            )

    def read_prompt(
        self,
        ids: Sequence[int],
        *,
        cancellation: Cancellation | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> torch.Tensor:
        """Reads ``ids`` (at least one) after what the session holds; returns the last row's logits, FP32 [V].

        Cancelled or failed half-way, the session is empty again: recurrent state advances with a prompt's rows and
        cannot be taken back.
        """
        if not ids:
            raise RequestError("the prompt is empty", "give at least one token of text")
        self.check_room(len(ids))
        began, start = time.perf_counter(), self.length
        end = start + len(ids)
        logits_TV: torch.Tensor | None = None
        try:
            with self._sequence.prompt(ids):
                for first, stop in chunk_bounds(start, end, self._sequence.chunk_rows or self._runtime.chunk_rows):
                    chunk = ids[first - start : stop - start]
                    logits_TV = self._forward(chunk, "last" if stop == end else "none", cancellation, certain=True)
                    self.commit(len(chunk))
                    self._chunks += 1
                    if on_progress:
                        on_progress(stop - start, len(ids))
        except BaseException:
            self.reset()
            raise
        assert logits_TV is not None
        self._prompt_tokens += len(ids)
        self._prompt_seconds += time.perf_counter() - began
        return logits_TV[-1].clone() if self._sequence.lends else logits_TV[-1]

    def round(
        self, ids: Sequence[int], *, cancellation: Cancellation | None = None, lent: bool = False
    ) -> torch.Tensor:
        """One decode round over a window of rows; returns logits FP32 [T, V]. Records them; see ``commit``.

        ``lent``: the logits may lie in memory that the next round overwrites.
        """
        self.check_room(len(ids))
        began = time.perf_counter()
        logits_TV = self._forward(ids, "all", cancellation, certain=False)
        assert logits_TV is not None
        if self._sequence.lends and not lent:
            logits_TV = logits_TV.clone()
        self._end_round(began)
        return logits_TV

    def greedy_round(self, ids: Sequence[int], *, cancellation: Cancellation | None = None) -> list[int]:
        """As ``round``; returns the id that follows each row: the lowest among the largest logits.

        Raises ``EngineError`` where a logit is NaN or the largest is not finite.
        """
        self.check_room(len(ids))
        began = time.perf_counter()
        best = self._sequence.best_ids(ids, cancellation)
        self._recorded = list(ids)
        if min(best) < 0:
            raise EngineError(
                f"row of position {self.length + best.index(-1)}: the largest logit is not a finite number",
                "the weights or a kernel are at fault: 'strata verify' finds which",
            )
        self._end_round(began)
        return best

    def _end_round(self, began: float) -> None:
        self._rounds += 1
        self._runtime.end_round()
        self._decode_seconds += time.perf_counter() - began

    def commit(self, num_rows: int, *, decoded: bool = False) -> None:
        """Accepts the first ``num_rows`` recorded rows and forgets the others."""
        assert 0 <= num_rows <= len(self._recorded), (num_rows, len(self._recorded))
        self._sequence.commit(num_rows)
        self.tokens.extend(self._recorded[:num_rows])
        self._recorded = []
        if decoded:
            self._decode_tokens += num_rows

    def _forward(
        self, ids: Sequence[int], logits: LogitRows, cancellation: Cancellation | None, *, certain: bool
    ) -> torch.Tensor | None:
        result = self._sequence.forward(list(ids), logits, cancellation, certain=certain)
        self._recorded = list(ids)
        return result

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(
            self._prompt_tokens,
            self._prompt_seconds,
            self._chunks,
            self._rounds,
            self._decode_tokens,
            self._decode_seconds,
        )
