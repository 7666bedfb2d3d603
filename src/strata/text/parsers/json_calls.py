"""Tool calls as JSON: ``{"name": ..., "arguments": {...}}``, the format that Hermes models made common.

It must not know where a call's block begins and ends; ``tool_blocks.py`` does.
"""

from __future__ import annotations

import json
from typing import Any

from strata.text.parsers.tool_blocks import Body, Call, Unread, arguments_json

__all__ = ["JsonCalls"]


class JsonCalls:
    """Reads bodies of this format. Line breaks inside strings, which models write, are taken as they stand."""

    opening = "{"

    def read(self, body: str) -> Body:
        """One call, or why there is none."""
        try:
            value = json.loads(body, strict=False, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            # Only an open string can hold the closing tag that ended this body.
            return Unread.INCOMPLETE if error.msg.startswith("Unterminated string") else Unread.MALFORMED
        except (ValueError, RecursionError):
            return Unread.MALFORMED
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not name:
            return Unread.MALFORMED
        arguments = _arguments(value.get("arguments", value.get("parameters", {})))
        return Unread.MALFORMED if arguments is None else Call(name, arguments)


def _arguments(value: Any) -> str | None:
    """The JSON of an object; models also write it inside a string, or null for none."""
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False, parse_constant=_no_constant) if value.strip() else {}
        except (ValueError, RecursionError):
            return None
    if value is None:
        value = {}
    return arguments_json(value) if isinstance(value, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
