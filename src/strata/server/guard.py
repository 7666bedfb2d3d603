"""Keeps web pages out: without authentication, only programs of this PC may ask.

Lives in ``server``. A page that the user visits can send requests to the loopback address, under its own origin or
under a name that it lets point there; both show in the headers. It must not know what is asked.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from strata.errors import RequestError
from strata.server.faults import error_response

__all__ = ["LoopbackOnly", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this PC: localhost or a loopback address, IPv6 with or without brackets."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LoopbackOnly:
    """Refuses requests (403) whose Host or Origin is not of this PC."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            for name, url in (("Host", f"//{headers.get('host', 'localhost')}"), ("Origin", headers.get("origin"))):
                if url is not None and not is_loopback(_host_of(url)):
                    error = RequestError(
                        f"{name} {headers[name]!r} is not of this PC",
                        "the server has no authentication and serves programs of this PC alone",
                        http_status=403,
                        code="forbidden",
                    )
                    await error_response(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
