"""What Ctrl-C does, from the program's first line to its end: at first it ends the process, later it interrupts.

Lives on top because the way into the program, its commands, and rooms that import something heavy late all need it.
Python raises ``KeyboardInterrupt`` wherever it happens to be. In the middle of an import of native code that is lost,
becomes another error, or aborts the process; but until then nothing was taken or written that needs undoing. So the
program begins with a handler that ends it. A command that imported what it needs goes on ``in_order``: from there
Ctrl-C raises ``KeyboardInterrupt``, temporary files are removed and memory is given back.

All of it does nothing unless the program called ``begin``: in a Python program that imports Strata signals are its own.
Imports next to nothing itself, since until ``begin`` an interruption ends in Python's own words.
"""

from __future__ import annotations

import os
import signal

from strata import collector

TYPE_CHECKING = False  # that of ``typing`` takes longer to import than all else here
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["STATUS", "at_once", "begin", "end", "end_at_once", "in_order", "none_lost", "tell"]

STATUS = 130

_begun = False  # the signal is the program's: it was neither ignored by who started it nor handled by anybody


def begin() -> None:
    """Ctrl-C ends the process from here on. A signal that whoever started the program ignores stays ignored."""
    global _begun
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _begun = _set(end_at_once)


def in_order() -> None:
    """All that is heavy is imported: Ctrl-C raises ``KeyboardInterrupt`` from here on."""
    collector.resume()
    if _begun and signal.getsignal(signal.SIGINT) is end_at_once:
        _set(signal.default_int_handler)


def end() -> None:
    """The work is done, only the interpreter's own end is left: Ctrl-C does nothing any more."""
    _set(signal.SIG_IGN)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """One line, and the process is gone: no Python code runs that could swallow this, no destructor is waited for."""
    try:
        tell()
    finally:
        os._exit(STATUS)


def tell() -> None:
    """The line that an interrupted command ends with; on a terminal behind the ``^C`` that it shows. The program is
    about to end: another press does nothing."""
    if _begun:
        end()
    try:  # noqa: SIM105 - contextlib would be one import more before ``begin``
        os.write(2, b"\nstrata: interrupted\n" if os.isatty(2) else b"strata: interrupted\n")
    except OSError:
        pass  # the status alone has to tell


class at_once:  # noqa: N801 - used as a block; contextlib would be one import more before ``begin``
    """A block that imports something heavy late: Ctrl-C ends the process in it. Nothing half written may be open."""

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        raises = self._before is signal.default_int_handler or isinstance(self._before, _Kept)
        self._changed = _begun and raises and _set(end_at_once)

    def __exit__(self, *_: object) -> None:
        if self._changed:
            _set(self._before)


class none_lost:  # noqa: N801 - as above
    """A block in order: what interrupts it also ends it, where something on the way swallowed ``KeyboardInterrupt``
    (a destructor, or a callback of native code)."""

    def __enter__(self) -> None:
        in_order()
        self._kept = _Kept()
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._changed = _begun and is_default and _set(self._kept)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._changed:
            _set(signal.default_int_handler)
            if self._kept.pressed and kind is None:
                raise KeyboardInterrupt


class _Kept:
    """Python's own handler, with a memory."""

    pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        raise KeyboardInterrupt


def _set(handler: object) -> bool:
    """False in a thread that may not set it."""
    try:
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type] # what getsignal gave, or one of ours
    except ValueError:
        return False
    return True
