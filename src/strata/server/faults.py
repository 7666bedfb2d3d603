"""Errors as clients of OpenAI's interface expect them: one JSON body, one table of types, and whether to try again.

Lives in ``server`` because only HTTP has bodies and statuses; the words are the errors' own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from strata.errors import RequestError, StrataError

__all__ = ["FieldError", "NotServed", "error_body", "error_response", "json_bytes"]

# A client's library that repeats such a request by itself would only be told the same again.
_FINAL = {"x-should-retry": "false"}
_FIELD = re.compile(r"^([a-z_]+(?:\[\d+\])?)(?:\.[a-z_.\[\]\d]+)?: ")


class FieldError(RequestError):
    """A field of a request that cannot be taken; ``param`` names it."""

    def __init__(self, param: str, message: str, hint: str = "", *, http_status: int = 400, code: str = "") -> None:
        super().__init__(f"{param}: {message}", hint, http_status=http_status, code=code or "invalid_value")
        self.param = param


class NotServed(FieldError):  # noqa: N818 - what happened, not a fault
    """A field or a route that is part of the interface but not of this version (501)."""

    def __init__(self, param: str, message: str, hint: str = "") -> None:
        super().__init__(param, message, hint, http_status=501, code="not_implemented")


def error_body(error: StrataError) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``."""
    return {
        "error": {
            "message": str(error),
            "type": _type(error.http_status),
            "param": _param(error),
            "code": error.code,
        }
    }


def error_response(error: StrataError) -> Response:
    """The body under its HTTP status. Only a full queue is worth trying again."""
    headers = {"retry-after": "1"} if error.http_status == 429 else _FINAL
    return Response(json_bytes(error_body(error)), error.http_status, headers, "application/json")


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """UTF-8. Half a surrogate pair, which a client's own words can hold, stays the escape that it was sent as."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 501:
        return "not_implemented_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _param(error: StrataError) -> str | None:
    """The field that the error's words begin with, where they name one."""
    if isinstance(error, FieldError):
        return error.param
    named = _FIELD.match(error.message) if isinstance(error, RequestError) else None
    return named[1] if named else None
