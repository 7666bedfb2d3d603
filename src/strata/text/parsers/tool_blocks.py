"""Finds ``<tool_call>`` blocks in an answer as it streams; a format says what a block's body means.

A block is shown only when it is whole and its format can read it; until then it is held back, and a block that turns
out not to be one is said as text. Where a block ends is the format's word: a closing tag inside a quoted argument is
part of the argument. It must not know any one format.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from strata.text.events import AnswerEvent, TextPiece, ToolCall

__all__ = ["Body", "BodyFormat", "Call", "ToolBlockParser", "Unread", "function_schemas"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """What a body says: a function's name and the JSON of its arguments."""

    name: str
    arguments: str


class Unread(enum.Enum):
    """Why a body is not a call (yet)."""

    INCOMPLETE = "the closing tag lies inside an argument"
    MALFORMED = "not of this format"


Body = Call | Unread


class BodyFormat(Protocol):
    """One tool-call format."""

    opening: str
    """What a body begins with, after white space."""

    def read(self, body: str) -> Body:
        """Read the text between the tags."""
        ...


class ToolBlockParser:
    """Splits one answer into text and calls. White space before a call and between calls belongs to the format."""

    markers = (_OPEN, _CLOSE)

    def __init__(self, body_format: BodyFormat) -> None:
        self._format = body_format
        self._held = ""
        self._space = ""
        self._inside = False
        self._searched = 0
        self.num_calls = 0

    def push(self, piece: str) -> list[AnswerEvent]:
        """Events that are certain with ``piece``."""
        self._held += piece
        events: list[AnswerEvent] = []
        while self._block(events) if self._inside else self._text(events):
            pass
        return events

    def finish(self) -> list[AnswerEvent]:
        """What was held back, as text: a block that was never closed is not a call."""
        held = self._space + self._held
        self._space, self._held, self._inside = "", "", False
        if self.num_calls and not held.strip():
            return []
        return [TextPiece(held)] if held else []

    def _text(self, events: list[AnswerEvent]) -> bool:
        """Say text up to the next opening tag; hold white space and beginnings of the tag at its end."""
        start = self._held.find(_OPEN)
        if start >= 0:
            before, self._held = self._held[:start], self._held[start:]
        else:
            beginning = next((size for size in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:size])), 0)
            before = self._held[: len(self._held) - beginning]
        certain = before.rstrip()
        if certain:
            events.append(TextPiece(certain))
        if start < 0:
            self._held = self._held[len(certain) :]
            return False
        self._space = before[len(certain) :]
        self._inside, self._searched = True, len(_OPEN)
        return True

    def _block(self, events: list[AnswerEvent]) -> bool:
        """Read the block that ``_held`` begins with, at the first closing tag where its format can."""
        body = self._held[len(_OPEN) :].lstrip()
        opening = self._format.opening
        if not body.startswith(opening[: len(body)]):
            return self._not_a_block(events)
        end = self._held.find(_CLOSE, self._searched)
        if end < 0:
            self._searched = max(len(_OPEN), len(self._held) - len(_CLOSE) + 1)
            return False
        self._searched = end + len(_CLOSE)
        call = self._format.read(self._held[len(_OPEN) : end].strip())
        if call is Unread.INCOMPLETE:
            return True
        if isinstance(call, Unread):
            return self._not_a_block(events)
        events.append(ToolCall(self.num_calls, call.name, call.arguments))
        self.num_calls += 1
        self._space, self._held, self._inside = "", self._held[self._searched :], False
        return True

    def _not_a_block(self, events: list[AnswerEvent]) -> bool:
        """Say the opening tag as text, and the white space before it, and go on behind it."""
        events.append(TextPiece(self._space + _OPEN))
        self._space, self._held, self._inside = "", self._held[len(_OPEN) :], False
        return True


def function_schemas(tools: list[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Function name -> schema of each parameter, from the tools of a request."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools or []:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or function.get("input_schema") or {}
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas
