"""Messages of a user from lines: with editing and a history on a terminal, line by line from a pipe.

Lives in ``cli`` for ``strata chat``. It must not know what a message is for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from strata.errors import RequestError
from strata.files import open_regular
from strata.paths import find_home

__all__ = ["Lines", "terminal_lines"]

FENCE = '"""'
HISTORY_LINES = 2000


class Lines:
    """``read_line(prompt)`` gives a line without its end, and raises EOFError where there is none."""

    def __init__(self, read_line: Callable[[str], str]) -> None:
        self._read_line = read_line

    def next(self) -> str | None:
        """One message; None at the end. A backslash at a line's end and a block between lines of \"\"\" join lines.

        An end of input inside a message ends that message. KeyboardInterrupt passes through: the message is dropped.
        """
        try:
            line = self._read_line("> ")
        except EOFError:
            return None
        lines: list[str] = []
        with contextlib.suppress(EOFError):
            if line.lstrip().startswith(FENCE):
                line = line.lstrip()[len(FENCE) :]
                while not line.rstrip().endswith(FENCE):
                    lines.append(line)
                    line = ""
                    line = self._read_line(". ")
                line = line.rstrip()[: -len(FENCE)]
            else:
                while line.endswith("\\"):
                    lines.append(line[:-1])
                    line = ""
                    line = self._read_line(". ")
        return "\n".join([*lines, line]).strip("\n")


def terminal_lines() -> Lines:
    """Lines of standard input; on a terminal with editing, and a history in STRATA_HOME where the system has one."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return Lines(_read_piped)
    history = _open_history()
    return Lines(lambda prompt: _read_typed(prompt, history))


def _read_piped(prompt: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error.reason}", "send text") from None
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _read_typed(prompt: str, history: Callable[[], None] | None) -> str:
    line = input(prompt)
    if history and line:
        history()
    return line


def _open_history() -> Callable[[], None] | None:
    """Reads the history and returns what keeps the line typed last; None where the system has no line editing."""
    try:
        readline: Any = import_module("readline")
    except ImportError:
        return None
    if not hasattr(readline, "append_history_file"):
        return None
    home = find_home()
    path: Path = home.make(home.root) / "chat-history"
    with contextlib.suppress(OSError):  # a history that cannot be read is no reason not to chat
        if not path.exists():
            path.touch(mode=0o600)
        os.close(open_regular(path))
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    if readline.get_current_history_length() > HISTORY_LINES:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)

    def keep() -> None:
        with contextlib.suppress(OSError):
            os.close(open_regular(path))
            readline.append_history_file(1, path)

    return keep
