"""A round without a mailbox that works while launches run: the host hands each layer's CPU part over between graphs.

Lives in ``engine`` beside ``device_rounds``, which runs rounds this way where the mailbox's self-test failed
(``mailbox_check``) or ``STRATA_MAILBOX=off`` says so. The same launches in the same order, so the same bits; slower by
a wait of the host in every layer. It must not know what a launch computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from strata.errors import EngineError

if TYPE_CHECKING:
    from strata.kernels.cpu.conductor import Conductor
    from strata.kernels.cuda.program import Launch, Machine

__all__ = ["HandedOver"]

logger = logging.getLogger(__name__)

_POSTS = "round.route_"  # the launch that writes the CPU's part of a layer
_WAITS = "round.combine"  # the launch that needs its answer


class HandedOver:
    """A ``Runnable`` that is complete when ``run`` returns, but for its last launches. ``limit_ms`` is asked each time.

    A layer's experts on the card run while the CPU computes its own. Without an answer in time the round is given up:
    the abort word is set and the rest runs without waiting.
    """

    def __init__(
        self, machine: Machine, launches: list[Launch], conductor: Conductor, limit_ms: Callable[[], int]
    ) -> None:
        self._machine, self._conductor, self._limit_ms = machine, conductor, limit_ms
        self._parts = [(part[0].kernel, part[-1].kernel, machine.prepare(part)) for part in _cut(launches)]

    def run(self) -> None:
        waits = True
        for first, last, runnable in self._parts:
            if waits and first == _WAITS:
                try:
                    self._conductor.settle(self._limit_ms())
                except EngineError as error:
                    logger.warning("%s", error)
                    self._conductor.abort()
                    waits = False
            runnable.run()
            if waits and last.startswith(_POSTS):
                self._machine.synchronize()  # what it has posted is seen at the latest now


def _cut(launches: list[Launch]) -> Iterator[list[Launch]]:
    """Parts that end with a post or before a wait."""
    part: list[Launch] = []
    for launch in launches:
        if part and launch.kernel == _WAITS:
            yield part
            part = []
        part.append(launch)
        if launch.kernel.startswith(_POSTS):
            yield part
            part = []
    if part:
        yield part
