"""Progress bars on a terminal, silence elsewhere, and log lines that do not tear them.

Lives on top because packing, loading and downloads show progress and logging must know of a bar being drawn. Rooms
below the engine take a callback instead, but for the compiler of kernels, which works wherever a first launch is.
Nothing here knows what is counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["bar", "write_line"]

_drawn: list[Progress] = []


@contextlib.contextmanager
def bar(title: str, total: int, *, unit: str = "", enabled: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Yields ``advance(n)``. Draws on standard error if that is a terminal (or ``enabled``); else does nothing.

    ``unit`` 'B' counts bytes. The bar disappears at the end; what is worth keeping belongs in the log. One that is
    drawn already waits meanwhile.
    """
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn(binary_units=True) if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn())
    with _paused(), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        _drawn.append(progress)
        try:
            yield lambda n: progress.advance(task, n)
        finally:
            _drawn.remove(progress)


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    """Takes the bar that is drawn from the terminal: only one is at a time."""
    outer = _drawn[-1] if _drawn else None
    if outer is not None:
        outer.stop()
    try:
        yield
    finally:
        if outer is not None:
            outer.start()


def write_line(line: str) -> None:
    """Writes one line to standard error, above a bar if one is being drawn."""
    if _drawn:
        _drawn[-1].console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
