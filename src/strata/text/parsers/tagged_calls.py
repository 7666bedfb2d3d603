"""Tool calls as tags: ``<function=name>`` with ``<parameter=key>`` blocks, the format of our first family.

Values are plain text; the request's schema says which are numbers, booleans, lists or objects. It must not know
where a call's block begins and ends; ``tool_blocks.py`` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from strata.text.parsers.tool_blocks import Body, Call, Unread, arguments_json, function_schemas

__all__ = ["TAGS", "TaggedCalls"]

TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")

_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
# A value may hold the closing tag: it ends where the format goes on behind it.
_VALUE_END = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = "</function>"
_WORDS = {"true": True, "false": False}


class TaggedCalls:
    """Reads bodies of this format; ``tools`` gives the types of values, text being the default."""

    opening = "<function="

    def __init__(self, tools: list[dict[str, Any]] | None = None) -> None:
        self._schemas = function_schemas(tools)

    def read(self, body: str) -> Body:
        """One call, or why there is none."""
        head = _FUNCTION.match(body)
        if head is None:
            return Unread.MALFORMED
        name = head[1].strip()
        schemas = self._schemas.get(name, {})
        arguments: dict[str, Any] = {}
        position = head.end()
        while not body.startswith(_FUNCTION_END, position):
            opened = _PARAMETER.match(body, position)
            if opened is None:
                return Unread.MALFORMED
            closed = _VALUE_END.search(body, opened.end())
            if closed is None:
                return Unread.INCOMPLETE
            key = opened[1].strip()
            arguments[key] = _typed(body[opened.end() : closed.start()], schemas.get(key))
            position = closed.end()
        if body[position + len(_FUNCTION_END) :].strip():
            return Unread.MALFORMED
        return Call(name, arguments_json(arguments))


def _typed(text: str, schema: object) -> Any:
    """``text`` as the schema wants it; as it stands where it does not fit or nothing is wanted."""
    kinds = _kinds(schema)
    word = text.strip()
    if "null" in kinds and word == "null":
        return None
    if "string" in kinds or not kinds:
        return text
    if "boolean" in kinds and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    return value if _fits(value, kinds) else text


def _kinds(schema: object) -> set[str]:
    """The JSON types that a schema names, through its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {kind for kind in named or () if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        for alternative in schema.get(name) or ():
            kinds |= _kinds(alternative)
    return kinds


def _fits(value: object, kinds: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return bool(kinds & {"integer", "number"})
    if isinstance(value, float):
        return "number" in kinds or ("integer" in kinds and value.is_integer())
    return (isinstance(value, dict) and "object" in kinds) or (isinstance(value, list) and "array" in kinds)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
