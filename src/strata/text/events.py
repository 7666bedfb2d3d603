"""What an answer consists of, piece by piece: the vocabulary between the text room and those who show answers.

It must not know how the pieces are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["AnswerEvent", "Finish", "FinishReason", "ReasoningPiece", "TextPiece", "ToolCall", "merged"]


@dataclass(frozen=True)
class TextPiece:
    """Some more of what is said to the user."""

    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    """Some more of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """One whole call. ``index`` counts from 0 within the answer, ``arguments`` is the JSON of an object."""

    index: int
    name: str
    arguments: str


AnswerEvent = TextPiece | ReasoningPiece | ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Finish:
    """Why an answer ended. ``stop_string`` or ``stop_id`` says what ended it, where ``reason`` is not "length"."""

    reason: FinishReason
    stop_string: str | None = None
    stop_id: int | None = None


def merged(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """The same answer in the fewest pieces: neighbours of one kind joined, empty ones left out."""
    whole: list[AnswerEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            whole[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ReasoningPiece) and isinstance(last, ReasoningPiece):
            whole[-1] = ReasoningPiece(last.text + event.text)
        elif isinstance(event, ToolCall) or event.text:
            whole.append(event)
    return whole
