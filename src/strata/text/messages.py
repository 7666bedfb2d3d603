"""Conversations as clients send them, checked and put into the one shape that chat templates expect.

Content given as a list of text parts is joined; tool calls get their arguments as an object (clients send JSON in a
string) or, where a model wrote something else, as its text; reasoning is found under each of its names. Everything else
is refused by name. It must not know templates.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from strata.errors import RequestError

__all__ = ["ROLES", "plain_messages", "plain_tools"]

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A deep, plain copy of ``messages``; raises RequestError naming the message that cannot be taken."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages: not a list", "send a list of objects with role and content")
    if not messages:
        raise RequestError("messages: the list is empty", "send at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A plain copy of ``tools``, each with a function's name; None for none."""
    if not tools:
        return None
    copies = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{index}]: no function name", 'send {"type": "function", "function": {...}}')
        copies.append(_json_copy(tool, f"tools[{index}]"))
    return copies


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: not an object", "send an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}: role {role!r} is not known", f"allowed: {', '.join(ROLES)}")
    plain: dict[str, Any] = {}
    for key, value in message.items():
        if key == "content":
            plain[key] = _content(value, where)
        elif key in _REASONING_NAMES:
            plain["reasoning_content"] = plain.get("reasoning_content") or _content(value, f"{where}.{key}")
        elif key == "tool_calls":
            plain[key] = _calls(value, f"{where}.{key}")
        else:
            plain[key] = _json_copy(value, f"{where}.{key}")
    if plain.get("content") is None and role != "assistant":
        raise RequestError(f"{where}: no content", "send a string or a list of text parts")
    return plain


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where}: content is a {type(content).__name__}", "send a string or a list of text parts")
    return "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise RequestError(f"{where}: a part of type {kind!r} is not read", "this model reads text parts alone")
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where}: not a list", "send a list of tool calls")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: no function name", 'send {"type": "function", "function": {...}}')
    plain: dict[str, Any] = _json_copy(call, where)
    plain["function"]["arguments"] = _arguments(plain["function"].get("arguments"), where)
    plain.setdefault("type", "function")
    return plain


def _arguments(given: Any, where: str) -> dict[str, Any] | str:
    """An object, or the text of what is none: it was a model that wrote it, and its conversation goes on."""
    if given is None or given == "":
        return {}
    value, why = given, ""
    if isinstance(given, str):
        try:
            value = json.loads(given)
            json.dumps(value, ensure_ascii=False).encode()  # an escape can stand for half a surrogate pair
        except (ValueError, RecursionError) as error:
            value, why = None, f"not JSON ({error})"
        if value is None and not why:
            return {}
    if isinstance(value, dict):
        return value
    logger.warning("%s: its arguments are %s: they reach the model as text", where, why or "no JSON object")
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _json_copy(value: Any, where: str) -> Any:
    """A deep copy in JSON's own types, so that a template meets nothing else."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not plain JSON: {error}", "send strings, numbers, lists and objects") from error
