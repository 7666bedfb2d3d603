"""Several runs of one code that go on in turns and meet: what each brings to a meeting is answered for all at once.

Lives in ``engine`` because a chunk of a prompt is such a run: each of its passes runs the model's forward, and all of
them meet at a layer's experts. One of the runs computes at a time, in their order, so what one leaves behind the next
one finds. It must not know what is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Abandoned", "run_together"]

Meet = Callable[[Any], Any]


class Abandoned(BaseException):
    """Raised in a run whose meeting will not be answered, to end it. It is nobody's error."""


class _Run:
    """One run on a thread of its own. It goes on at ``go_on`` alone, until it meets the others or ends."""

    def __init__(self, work: Callable[[Meet], Any], scope: Callable[[], AbstractContextManager[Any]]) -> None:
        self.brought: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self._answer: Any = None
        self._abandoned = False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, args=(work, scope), name="prompt pass", daemon=True)
        self._thread.start()

    def go_on(self, answer: Any = None) -> None:
        """Runs on with the answer of its meeting; returns when it meets again or has ended. Raises its error."""
        self._answer = answer
        self._mine.release()
        self._theirs.acquire()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Ends it where it waits."""
        if not self.ended:
            self._abandoned = True
            self._mine.release()
        self._thread.join()

    def _meet(self, brought: Any) -> Any:
        self.brought = brought
        self._theirs.release()
        self._wait()
        answer, self._answer = self._answer, None
        return answer

    def _wait(self) -> None:
        self._mine.acquire()
        if self._abandoned:
            raise Abandoned

    def _work(self, work: Callable[[Meet], Any], scope: Callable[[], AbstractContextManager[Any]]) -> None:
        try:
            self._wait()
            with scope():
                self.result = work(self._meet)
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for this run
            self.error = error
        self.ended = True
        self._theirs.release()


def run_together(
    works: Sequence[Callable[[Meet], Any]],
    answer: Callable[[list[Any]], Sequence[Any]],
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Any]:
    """The results of all works. Each gets ``meet``, which hands a value over and returns what ``answer``, given those
    of all works, says for it; all must meet equally often. ``answer`` runs on the calling thread, each work inside
    ``scope()`` on its own. The first error ends all of them and is raised."""
    runs = [_Run(work, scope) for work in works]
    answers: Sequence[Any] = [None] * len(runs)
    try:
        while True:
            for run, own in zip(runs, answers, strict=True):
                run.go_on(own)
            ended = [run.ended for run in runs]
            if all(ended):
                return [run.result for run in runs]
            assert not any(ended), "all runs meet equally often"
            answers = answer([run.brought for run in runs])
    finally:
        for run in runs:
            run.abandon()
