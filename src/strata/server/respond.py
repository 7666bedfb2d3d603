"""From an answer to an HTTP response, whole or as events, while watching whether the client is still there.

Lives in ``server``, between routes and answers. Until the first piece has come, every fault is an HTTP status of its
own; after it, headers are sent and a fault is an event, with no reason and no end mark. It must not know routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata.errors import RequestError, StrataError
from strata.server.answers import Answer
from strata.server.faults import error_body, json_bytes
from strata.server.shapes import Shape

if TYPE_CHECKING:
    from strata.engine.generation import Piece

__all__ = ["respond"]

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


async def respond(receive: Receive, answer: Answer, shape: Shape, *, stream: bool) -> Response:
    """The response; the answer is cancelled when the client goes, and ends with this response in any case.

    Raises ``StrataError`` while nothing has been sent, and ``ClientDisconnect``.
    """
    watcher = asyncio.create_task(_watch(receive, answer))
    handed_over = False
    try:
        if not stream:
            async for piece in answer:
                _refuse_cancelled(piece, watcher)
                shape.take(piece)
            _log(answer, shape)
            return Response(json_bytes(shape.whole(answer.usage)), media_type="application/json")
        first = await anext(answer)
        _refuse_cancelled(first, watcher)
        handed_over = True
        return _EventStream(first, answer, shape, watcher)
    finally:
        if not handed_over:
            answer.cancel()
            watcher.cancel()


async def _watch(receive: Receive, answer: Answer) -> None:
    """Cancels the answer when the client closes its socket; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


def _refuse_cancelled(piece: Piece, watcher: asyncio.Task[None]) -> None:
    if piece.finish == "cancelled":
        if watcher.done():
            raise ClientDisconnect
        raise _stopping()


def _stopping() -> RequestError:
    return RequestError("the server is stopping", http_status=503, code="stopping")


def _log(answer: Answer, shape: Shape) -> None:
    usage = answer.usage
    if usage is None:
        return
    rate = usage.rounds / usage.decode_seconds if usage.decode_seconds else 0.0
    logger.info(
        "%s: prompt of %d tokens (%d kept) in %.0f ms, %d tokens at %.1f tok/s",
        shape.kind,
        usage.prompt_tokens,
        usage.cached_tokens,
        1e3 * usage.prompt_seconds,
        usage.completion_tokens,
        rate,
    )


class _EventStream(Response):
    """Server-sent events of one answer that has begun."""

    media_type = "text/event-stream"

    def __init__(self, first: Piece, answer: Answer, shape: Shape, watcher: asyncio.Task[None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._answer, self._shape, self._watcher = first, answer, shape, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send_answer(send)
            except StrataError as error:
                logger.error("an answer broke off: %s", error)
                await _send(send, error_body(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            logger.debug("the client closed the stream")
        finally:
            self._answer.cancel()
            self._watcher.cancel()

    async def _send_answer(self, send: Send) -> None:
        for chunk in self._shape.first():
            await _send(send, chunk)
        await self._send_piece(send, self._first)
        async for piece in self._answer:
            if piece.finish == "cancelled":
                if self._watcher.done():
                    logger.info("%s: the client left in the middle of the answer", self._shape.kind)
                    return
                raise _stopping()
            await self._send_piece(send, piece)
        for chunk in self._shape.last(self._answer.usage):
            await _send(send, chunk)
        await send({"type": "http.response.body", "body": _DONE, "more_body": True})
        _log(self._answer, self._shape)

    async def _send_piece(self, send: Send, piece: Piece) -> None:
        for chunk in self._shape.take(piece):
            await _send(send, chunk)


async def _send(send: Send, value: Mapping[str, Any]) -> None:
    await send({"type": "http.response.body", "body": b"data: " + json_bytes(value) + b"\n\n", "more_body": True})
