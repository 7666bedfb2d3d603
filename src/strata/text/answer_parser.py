"""The parsers of one answer in a row: reasoning first, tool calls in what is left.

It must not know tokens; ``stream.py`` feeds it text.
"""

from __future__ import annotations

from typing import Any, Literal

from strata.errors import ConfigError
from strata.text.events import AnswerEvent, TextPiece
from strata.text.parsers.json_calls import JsonCalls
from strata.text.parsers.reasoning import ReasoningParser
from strata.text.parsers.tagged_calls import TaggedCalls
from strata.text.parsers.tool_blocks import BodyFormat, ToolBlockParser

__all__ = ["AnswerParser", "ToolFormat", "tool_format_of"]

ToolFormat = Literal["tagged", "json"]


def tool_format_of(template: str) -> ToolFormat | None:
    """The tool-call format that a chat template asks for, by the markup it writes."""
    if "<tool_call>" not in template:
        return None
    return "tagged" if "<function=" in template else "json"


class AnswerParser:
    """Text in, events out; text alone where neither format is asked for."""

    def __init__(
        self,
        *,
        reasoning: bool = False,
        opened: bool = False,
        tool_format: ToolFormat | None = None,
        tools: list[dict[str, Any]] | None = None,
        forced: bool = False,
        before: str = "",
    ) -> None:
        """``reasoning``: answers can begin with ``<think>``; ``opened``: the prompt ended with it. ``tool_format``
        None leaves ``<tool_call>`` as text, as for a request without tools. ``forced``: every block is a call, in code
        too. ``before``: what the message says already that the answer goes on from, behind its reasoning."""
        self._reasoning = ReasoningParser(opened=opened) if reasoning or opened else None
        self._tools = (
            None
            if tool_format is None
            else ToolBlockParser(_body_format(tool_format, tools), forced=forced, before=before)
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must reach this parser even where the tokenizer hides them."""
        return tuple(marker for parser in (self._reasoning, self._tools) if parser for marker in parser.markers)

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer is inside its reasoning now."""
        return self._reasoning is not None and self._reasoning.reasoning

    @property
    def num_calls(self) -> int:
        """Tool calls found so far."""
        return self._tools.num_calls if self._tools else 0

    def push(self, piece: str) -> list[AnswerEvent]:
        """Events that are certain with ``piece``."""
        return self._through_tools(self._reasoning.push(piece) if self._reasoning else [TextPiece(piece)])

    def finish(self) -> list[AnswerEvent]:
        """What was held back at the answer's end."""
        events = self._through_tools(self._reasoning.finish() if self._reasoning else [])
        return events + (self._tools.finish() if self._tools else [])

    def _through_tools(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if self._tools is None:
            return events
        through: list[AnswerEvent] = []
        for event in events:
            through += self._tools.push(event.text) if isinstance(event, TextPiece) else [event]
        return through


def _body_format(tool_format: str, tools: list[dict[str, Any]] | None) -> BodyFormat:
    if tool_format == "tagged":
        return TaggedCalls(tools)
    if tool_format == "json":
        return JsonCalls()
    raise ConfigError(f"tool format {tool_format!r} is not known", "known: tagged, json")
