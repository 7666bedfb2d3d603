"""Shows one answer as it comes, with Ctrl-C stopping the answer rather than the program's manners.

Lives in ``cli``; ``run``, ``demo`` and ``chat`` share it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata.text.events import ReasoningPiece, TextPiece, ToolCall
from strata.words import count_of

if TYPE_CHECKING:
    from strata.engine.cancellation import Cancellation
    from strata.engine.engine import Engine, Request

__all__ = ["log_usage", "stopped_by_ctrl_c", "stream_answer"]

logger = logging.getLogger(__name__)


def stream_answer(engine: Engine, request: Request) -> int:
    """Writes the answer to standard output piece by piece and the two lines of figures to the log.

    Status 0, or 130 when Ctrl-C ended it."""
    from strata.engine.cancellation import Cancellation

    cancellation = Cancellation()
    with stopped_by_ctrl_c(cancellation):
        for piece in engine.submit(request, cancellation=cancellation):
            for event in piece.events:
                if isinstance(event, (TextPiece, ReasoningPiece)):
                    sys.stdout.write(event.text)
                elif isinstance(event, ToolCall):
                    sys.stdout.write(f"\n[tool call {event.name} {event.arguments}]\n")
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    log_usage(engine)
    return 130 if cancellation.cancelled else 0


@contextlib.contextmanager
def stopped_by_ctrl_c(cancellation: Cancellation) -> Iterator[None]:
    """Ctrl-C cancels at the next safe place, so that the engine keeps what it has read; a second one interrupts.

    Where whoever started the program ignores the signal, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def stop(number: int, frame: object) -> None:
        if cancellation.cancelled:
            raise KeyboardInterrupt
        cancellation.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def log_usage(engine: Engine) -> None:
    """``prompt: ...`` and ``decode: ...``, one line each, of the last request."""
    usage = engine.last_usage
    if usage is None:
        return
    read = usage.prompt_tokens - usage.cached_tokens
    if usage.prompt_seconds:
        took, rate = 1e3 * usage.prompt_seconds, read / usage.prompt_seconds
        logger.info("prompt: %s read in %.0f ms (%.1f tok/s)", count_of(read, "token"), took, rate)
    if usage.rounds:
        after_first = max(0, usage.completion_tokens - 1)  # the prompt gives the first token, rounds give the others
        logger.info(
            "decode: %s, %s, %.2f ms a round, %.1f tok/s, %.2f tokens a round",
            count_of(usage.completion_tokens, "token"),
            count_of(usage.rounds, "round"),
            1e3 * usage.decode_seconds / usage.rounds,
            after_first / usage.decode_seconds,
            after_first / usage.rounds,
        )
