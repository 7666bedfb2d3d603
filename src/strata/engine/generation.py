"""One answer: logits to tokens to pieces of text, until an end id, a stop string, the length, or a cancellation.

Lives in ``engine``, between a session and those who show answers. The loop is four verbs: pick, show, round, commit.
It must not know HTTP or a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.engine.cancellation import Cancellation, Cancelled
from strata.engine.sampler import Choice, Sampler
from strata.engine.sampling_params import SamplingParams
from strata.text.events import AnswerEvent, TextPiece
from strata.text.stream import TextStream

if TYPE_CHECKING:
    import torch

    from strata.engine.session import Session

__all__ = ["EndReason", "Piece", "answer"]

EndReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True)
class Piece:
    """What one round gave. ``choice`` is None for the closing piece of an answer that ended by its length.

    ``finish`` is None until the last piece. ``events`` are what is certain to be shown; a token inside a character or
    a possible stop string gives none yet.
    """

    events: tuple[AnswerEvent, ...]
    choice: Choice | None = None
    finish: EndReason | None = None

    @property
    def text(self) -> str:
        """The text for the user among the events."""
        return "".join(event.text for event in self.events if isinstance(event, TextPiece))


def answer(
    session: Session,
    logits_V: torch.Tensor,
    stream: TextStream,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    end_ids: Sequence[int],
    room: int,
    cancellation: Cancellation | None = None,
) -> Iterator[Piece]:
    """Pieces of the answer that follows ``logits_V``; at most ``room`` tokens fit the context.

    The tokens that were shown are committed to the session except the last one, whose row no round has read yet.
    """
    sampler = Sampler(params, prompt, end_ids=end_ids)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    count = 0
    choice = sampler.pick(logits_V.numpy(), row=f"of position {session.length - 1}")
    while True:
        sampler.accept(choice.token)
        count += 1
        events = stream.push(choice.token)
        if stream.finish is None and count >= limit:
            events = [*events, *stream.close()]
        yield Piece(tuple(events), choice, stream.finish.reason if stream.finish else None)
        if stream.finish is not None:
            return
        try:
            if cancellation:
                cancellation.check()
            choice = _next(session, sampler, choice.token, cancellation)
        except Cancelled:
            yield Piece(tuple(stream.close()), None, "cancelled")
            return
        session.commit(1, decoded=True)


def _next(session: Session, sampler: Sampler, token: int, cancellation: Cancellation | None) -> Choice:
    """One round: what follows ``token``. Where the largest logit decides, the device has found it."""
    if sampler.takes_largest:
        return Choice(session.greedy_round([token], cancellation=cancellation)[0])
    logits_V = session.round([token], cancellation=cancellation, lent=True)[0]
    return sampler.pick(logits_V.numpy(), row=f"of position {session.length}")
