"""Loads an engine for a command: a progress bar on a terminal, and the lines that users look for in the log.

Lives in ``cli`` because bars belong to a terminal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from strata import interrupts
from strata.progress import bar

if TYPE_CHECKING:
    from strata.checkpoint.pack_writer import Progress
    from strata.config import Requested
    from strata.engine.engine import Engine

__all__ = ["load_engine", "phase_bars"]


@contextlib.contextmanager
def phase_bars() -> Iterator[Progress]:
    """Yields ``on_progress(phase, done, total)`` in bytes; each phase draws its own bar."""
    with contextlib.ExitStack() as stack:
        phase_drawn, seen = "", 0
        advance: Callable[[int], None] = lambda n: None  # noqa: E731 - replaced by each phase's own

        def on_progress(phase: str, done: int, total: int) -> None:
            nonlocal phase_drawn, seen, advance
            if phase != phase_drawn:
                stack.pop_all().close()
                advance = stack.enter_context(bar(phase, total, unit="B"))
                phase_drawn, seen = phase, 0
            advance(done - seen)
            seen = done

        yield on_progress


def load_engine(requested: Requested) -> Engine:
    """Opens the model that was asked for. A wrong path is told before anything heavy is imported.

    Ctrl-C ends the program at once until the imports are done, and raises ``KeyboardInterrupt`` from there on."""
    from strata.engine.locate import locate

    locate(requested.model)
    from strata.engine.early_card import open_card_early

    with open_card_early(requested):
        from strata.engine.engine import Engine

        with interrupts.none_lost(), phase_bars() as on_progress:
            return Engine.load(requested=requested, on_progress=on_progress)
