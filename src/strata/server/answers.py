"""Answers that are being computed: a thread for each, its pieces brought to the event loop, and a way to stop it.

Lives in ``server``, between the engine, which is plain Python and waits its turn in the thread that calls it, and
routes, which must never wait in theirs. It must not know JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from strata.engine.cancellation import Cancellation
from strata.errors import EngineError, RequestError, StrataError
from strata.server.served import ServedEngine

if TYPE_CHECKING:
    from strata.engine.engine import Request, Usage
    from strata.engine.generation import Piece

__all__ = ["MAX_REQUESTS", "Answer", "Answers"]

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Each waiting request holds a thread and its prompt; a client that sends more is told to come again.
MAX_REQUESTS = 256


class Answer:
    """One request in the engine: an asynchronous iterator over its pieces. Belongs to one event loop.

    ``usage`` is there once the pieces have ended. Raises, where the next piece is awaited, what the engine raised.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.usage: Usage | None = None
        self._cancellation = Cancellation()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | StrataError | None] = asyncio.Queue()

    def cancel(self) -> None:
        """Ends the answer within a layer's or a round's time. Harmless when repeated or late."""
        self._cancellation.cancel()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, StrataError):
            raise item
        return item

    def compute(self, engine: ServedEngine) -> StrataError | None:
        """Runs in the answer's own thread to its end; returns the error that ended it."""
        error: StrataError | None = None
        try:
            for piece in engine.submit(self.request, cancellation=self._cancellation, on_usage=self._take_usage):
                self._bring(piece)
        except StrataError as known:
            error = known
        except Exception as unknown:  # the end of a thread: nobody else would hear of it
            logger.exception("an answer ended unexpectedly")
            error = EngineError(f"unexpected {type(unknown).__name__}: {unknown}", "the server's log says where")
        self._bring(error)
        return error

    def _take_usage(self, usage: Usage) -> None:
        self.usage = usage

    def _bring(self, item: Piece | StrataError | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop has ended: nobody waits
            self.cancel()


class Answers:
    """All answers of one server. ``last_error``: the engine's fault that ended the last request."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.last_error: EngineError | None = None
        self.stopping = False
        self._active: set[Answer] = set()
        self._preparing = 0

    async def prepare(self, make: Callable[_P, _T], *args: _P.args, **how: _P.kwargs) -> _T:
        """``make(*args)`` in a thread of its own, so that no other request waits for a long one. Raises what it raises,
        and ``RequestError`` as ``start`` does."""
        self._refuse()
        loop = asyncio.get_running_loop()
        made: asyncio.Future[_T] = loop.create_future()

        def tell(tell_it: Callable[[], None]) -> None:
            if not made.done():  # it is where the route was given up
                tell_it()

        def run() -> None:
            try:
                value = make(*args, **how)
                done = functools.partial(made.set_result, value)
            except Exception as error:  # noqa: BLE001 - raised again where the route waits
                done = functools.partial(made.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(tell, done)

        self._preparing += 1
        try:
            threading.Thread(target=run, name="strata-prompt", daemon=True).start()
            return await made
        finally:
            self._preparing -= 1

    def start(self, request: Request) -> Answer:
        """Begins at once or waits in the engine's queue. Raises ``RequestError``: 503 at the end, 429 when full."""
        self._refuse()
        answer = Answer(request)
        self._active.add(answer)
        threading.Thread(target=self._run, args=(answer,), name="strata-answer", daemon=True).start()
        return answer

    def stop(self) -> None:
        """Cancels every answer and takes no more."""
        self.stopping = True
        for answer in list(self._active):
            answer.cancel()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def _refuse(self) -> None:
        if self.stopping:
            raise RequestError("the server is stopping", http_status=503, code="stopping")
        if len(self._active) + self._preparing >= MAX_REQUESTS:
            raise RequestError(
                f"{MAX_REQUESTS} requests wait already", "try again later", http_status=429, code="queue_full"
            )

    def _run(self, answer: Answer) -> None:
        try:
            error = answer.compute(self.engine)
            self.last_error = error if isinstance(error, EngineError) else None
        finally:
            self._active.discard(answer)
