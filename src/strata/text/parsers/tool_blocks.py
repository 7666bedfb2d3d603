"""Finds ``<tool_call>`` blocks in an answer as it streams; a format says what a block's body means.

A block is shown only when it is whole and its format can read it; until then it is held back, and a block that turns
out not to be one is said as text. Where a block ends is the format's word: a closing tag inside a quoted argument is
part of the argument. A block in code or in a block quote is text (decision 0120); while that is undecided it is held
back. It must not know any one format.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from strata.text.events import AnswerEvent, TextPiece, ToolCall
from strata.text.parsers.code_context import CodeContext, Place

__all__ = ["Body", "BodyFormat", "Call", "ToolBlockParser", "Unread", "arguments_json", "function_schemas"]

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


@dataclass(frozen=True)
class _Block:
    """A block that can be read: ``raw`` as text, ``call`` where its place turns out to be no code."""

    raw: str
    call: Call
    place: Place


class ToolBlockParser:
    """Splits one answer into text and calls. White space before a call and between calls belongs to the format."""

    markers = (_OPEN, _CLOSE)

    def __init__(self, body_format: BodyFormat, *, forced: bool = False, before: str = "") -> None:
        """``forced``: the request forces a call, so every block is one, wherever it lies. ``before``: text of the same
        message that the answer goes on from."""
        self._format = body_format
        self._context = None if forced else CodeContext()
        if self._context is not None:
            self._context.push(before)
        self._held = ""
        self._inside = False
        self._searched = 0
        self._queue: deque[str | _Block] = deque()  # what has been read; its first block is undecided
        self._space = ""
        self.num_calls = 0

    def push(self, piece: str) -> list[AnswerEvent]:
        """Events that are certain with ``piece``."""
        self._held += piece
        while self._block() if self._inside else self._text():
            pass
        return self._decided()

    def finish(self) -> list[AnswerEvent]:
        """What was held back: a block that was never closed is text, and one behind an open fence is a call."""
        held, self._held, self._inside = self._held, "", False
        if self._context is not None:
            self._context.push(held)
            self._context.finish()
        events = self._decided()
        held, self._space = self._space + held, ""
        if self.num_calls and not held.strip():
            return events
        return [*events, TextPiece(held)] if held else events

    def _text(self) -> bool:
        """Read text up to the next opening tag; hold beginnings of the tag at its end."""
        start = self._held.find(_OPEN)
        if start < 0:
            beginning = next((size for size in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:size])), 0)
            certain = len(self._held) - beginning
            self._say(self._held[:certain])
            self._held = self._held[certain:]
            return False
        self._say(self._held[:start])
        self._held = self._held[start:]
        if self._context is not None and self._context.quoted:
            return self._not_a_block()
        self._inside, self._searched = True, len(_OPEN)
        return True

    def _block(self) -> bool:
        """Read the block that ``_held`` begins with, at the first closing tag where its format can."""
        body = self._held[len(_OPEN) :].lstrip()
        opening = self._format.opening
        if not body.startswith(opening[: len(body)]):
            return self._not_a_block()
        end = self._held.find(_CLOSE, self._searched)
        if end < 0:
            self._searched = max(len(_OPEN), len(self._held) - len(_CLOSE) + 1)
            return False
        self._searched = end + len(_CLOSE)
        call = self._format.read(self._held[len(_OPEN) : end].strip())
        if call is Unread.INCOMPLETE:
            return True
        if isinstance(call, Unread):
            return self._not_a_block()
        place = Place(code=False) if self._context is None else self._context.place()
        self._queue.append(_Block(self._held[: self._searched], call, place))
        self._held, self._inside = self._held[self._searched :], False
        return True

    def _not_a_block(self) -> bool:
        """Say the opening tag as text, and go on behind it."""
        self._say(_OPEN)
        self._held, self._inside = self._held[len(_OPEN) :], False
        return True

    def _say(self, text: str) -> None:
        if self._context is not None:
            self._context.push(text)
        if text:
            self._queue.append(text)

    def _decided(self) -> list[AnswerEvent]:
        """Events of the queue up to its first undecided block; white space at their end is held, as it may be a
        call's."""
        events: list[AnswerEvent] = []
        while self._queue:
            item = self._queue[0]
            if isinstance(item, _Block) and item.place.code is None:
                break
            self._queue.popleft()
            if isinstance(item, _Block) and not item.place.code:
                events.append(ToolCall(self.num_calls, item.call.name, item.call.arguments))
                self.num_calls += 1
                self._space = ""
                continue
            text = self._space + (item.raw if isinstance(item, _Block) else item)
            certain = text.rstrip()
            self._space = text[len(certain) :]
            if certain:
                events.append(TextPiece(certain))
        return events


def arguments_json(arguments: Mapping[str, Any]) -> str:
    """The JSON of a call's arguments. Half a surrogate pair that a model escaped stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text


def function_schemas(tools: list[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Function name -> schema of each parameter, from the tools of a request."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools or []:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or function.get("input_schema") or {}
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas
