"""``<think>`` reasoning ``</think>`` before an answer, told apart as it streams.

Reasoning can only open an answer (a later ``<think>`` is text), or has been opened by the prompt. Line breaks that
belong to the format, around the reasoning and before the answer, are left out. It must not know tool calls.
"""

from __future__ import annotations

from typing import Literal

from strata.text.events import AnswerEvent, ReasoningPiece, TextPiece

__all__ = ["ReasoningParser"]

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits one answer. ``opened``: the prompt ended with ``<think>``, so reasoning comes at once."""

    markers = (_OPEN, _CLOSE)

    def __init__(self, *, opened: bool = False) -> None:
        self._place: Literal["start", "reasoning_start", "reasoning", "answer_start", "answer"] = (
            "reasoning_start" if opened else "start"
        )
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._place.startswith("reasoning")

    def push(self, piece: str) -> list[AnswerEvent]:
        """Events that are certain with ``piece``."""
        self._held += piece
        events: list[AnswerEvent] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[AnswerEvent]:
        """What was held back. Reasoning that was never closed stays reasoning."""
        held, self._held = self._held, ""
        if self._place == "reasoning_start":
            held = held.strip("\n")
        elif self._place == "reasoning":
            held = held.rstrip("\n")
        elif self._place == "answer_start":
            held = held.lstrip("\n")
        if not held:
            return []
        return [ReasoningPiece(held) if self.reasoning else TextPiece(held)]

    def _step(self, events: list[AnswerEvent]) -> bool:
        """One move over ``_held``; False when more text is needed."""
        if self._place == "start":
            return self._start()
        if self._place == "answer":
            if self._held:
                events.append(TextPiece(self._held))
            self._held = ""
            return False
        if self._place in ("reasoning_start", "answer_start"):
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._place = "reasoning" if self._place == "reasoning_start" else "answer"
            return True
        return self._reason(events)

    def _start(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._held = text[len(_OPEN) :]
            self._place = "reasoning_start"
            return True
        if _OPEN.startswith(text):
            return False
        self._place = "answer"
        return True

    def _reason(self, events: list[AnswerEvent]) -> bool:
        thought, closed, rest = self._held.partition(_CLOSE)
        if closed:
            thought = thought.rstrip("\n")
            self._held, self._place = rest, "answer_start"
        else:
            certain = len(thought) - _open_end(thought)
            thought, self._held = thought[:certain], thought[certain:]
        if thought:
            events.append(ReasoningPiece(thought))
        return bool(closed)


def _open_end(text: str) -> int:
    """Length of the end of ``text`` that could be line breaks and the beginning of the closing tag."""
    beginning = next((size for size in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:size])), 0)
    body = text[: len(text) - beginning]
    return len(text) - len(body.rstrip("\n"))
