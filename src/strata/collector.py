"""Python's garbage collector, out of the way of imports: of what a start imports nothing is garbage.

Lives on top beside ``interrupts``, whose ``in_order`` says that everything heavy is imported. Looking through all
objects again and again took 0.2 s of the 1.8 s that torch and Strata take to import (cpu2), and every later look would
go through them as well. Imports next to nothing itself; Python programs that import Strata keep their collector.
"""

from __future__ import annotations

import gc

__all__ = ["pause", "resume"]

_paused = False


def pause() -> None:
    """Nothing is collected until ``resume``; nothing happens where the collector is off already. A command that imports
    nothing heavy ends without one."""
    global _paused
    if gc.isenabled():
        _paused = True
        gc.disable()


def resume() -> None:
    """Collects again, but never looks at what is there now. Does nothing unless it was paused."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
