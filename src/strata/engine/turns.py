"""Whose turn it is on one engine: requests are served one at a time, in the order in which they came.

Lives in ``engine`` because that is where requests meet. It must not know what a request is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from strata.engine.cancellation import Cancellation
from strata.errors import EngineError

__all__ = ["Turns"]


class Turns:
    """First come, first served; a waiting request can be cancelled."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: list[object] = []
        self._closed = False
        self.running = False

    @property
    def waiting(self) -> int:
        return len(self._queue) - int(self.running)

    @contextlib.contextmanager
    def take(self, cancellation: Cancellation) -> Iterator[bool]:
        """Yields True when it is this caller's turn, False when it was cancelled before."""
        ticket = object()
        with self._condition:
            if self._closed:
                raise EngineError("the engine is closed", "load it again")
            self._queue.append(ticket)
            while self._queue[0] is not ticket and not cancellation.cancelled and not self._closed:
                self._condition.wait(timeout=0.1)
            mine = self._queue[0] is ticket and not cancellation.cancelled
            closed = self._closed
            self.running = self.running or mine
        try:
            if closed:
                raise EngineError("the engine was closed while the request waited", "load it again")
            yield mine
        finally:
            with self._condition:
                self._queue.remove(ticket)
                if mine:
                    self.running = False
                self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
