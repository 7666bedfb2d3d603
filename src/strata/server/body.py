"""The JSON object of a request, read so that no other request waits and no half character gets further.

Lives in ``server`` because only HTTP has bodies. ``parse_body`` is for a thread: a large body is parsed in steps,
between which other threads run. It must not know fields.
"""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from strata.errors import RequestError
from strata.server.faults import FieldError

__all__ = ["MAX_BODY_BYTES", "parse_body", "read_bytes"]

# Ten times the text of the longest context that a family has; more is a mistake, and would be held in memory.
MAX_BODY_BYTES = 32 << 20
# From here on the library's scanner in C, which lets nobody run until it has ended, could take a tenth of a second.
_LARGE = 1 << 20
# The scanner of strings in C takes 30 ns an escape, and does not let others run either.
_MANY_ESCAPES = 1 << 20
_SHOWN = 64  # characters of a key in a path

_Node = tuple[Any, Any] | None
"""(the parent's node, the key or index in it); None for the body itself."""


async def read_bytes(request: Request) -> bytes:
    """The whole body. Raises ``RequestError`` (413) or ``ClientDisconnect``."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise RequestError(
                f"the request has more than {MAX_BODY_BYTES >> 20} MiB", "shorten it", http_status=413, code="too_large"
            )
    return bytes(data)


def parse_body(data: bytes) -> Mapping[str, Any]:
    """One JSON object whose strings are whole Unicode. Raises ``RequestError`` (400)."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        body = json.loads(text) if len(text) < _LARGE else _StepwiseDecoder(text.count("\\")).decode(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}", "send one JSON object", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(
            f"the request is a JSON {type(body).__name__}, not an object", "send one object", code="invalid_json"
        )
    _check_unicode(body)
    return body


class _StepwiseDecoder(json.JSONDecoder):
    """The library's own decoder with its scanner in Python: objects and lists in steps, strings still in C unless
    they have many escapes."""

    def __init__(self, num_escapes: int) -> None:
        super().__init__()
        if num_escapes > _MANY_ESCAPES:
            self.parse_string = json.decoder.py_scanstring  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _check_unicode(body: dict[str, Any]) -> None:
    """JSON lets clients send half a surrogate pair, in keys too; no tokenizer and no template could take it."""
    rest: list[tuple[Any, _Node]] = [(body, None)]
    while rest:
        value, node = rest.pop()
        if isinstance(value, str):
            if (half := _half(value)) is not None:
                code = f"U+{ord(value[half]):04X}"
                raise FieldError(_path(node), f"half a surrogate pair, {code}, at character {half}", _WAY_OUT)
        elif isinstance(value, list):
            rest += [(item, (node, index)) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            for key, item in value.items():
                if _half(key) is not None:
                    raise FieldError(_path((node, key)), "its name holds half a surrogate pair", _WAY_OUT)
                rest.append((item, (node, key)))


_WAY_OUT = "send whole Unicode characters"


def _half(text: str) -> int | None:
    """Where the first half of a surrogate pair stands."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _path(node: _Node) -> str:
    """``messages[0].content``; keys that are no plain names are written as JSON."""
    words: list[str] = []
    while node is not None:
        node, key = node
        if isinstance(key, str) and key.isidentifier() and key.isascii():
            words.append(f".{key[:_SHOWN]}")
        else:
            words.append(f"[{json.dumps(key[:_SHOWN] if isinstance(key, str) else key)}]")
    return "".join(reversed(words)).removeprefix(".")
