"""Logging: one line a message on standard error, and all of them with time and place in a file if asked.

Lives on top; rooms only do ``logging.getLogger(__name__)`` and log. Information is printed as it is, because users
rely on those lines; warnings and errors carry their level.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

from strata.config import Requested
from strata.errors import ConfigError
from strata.progress import write_line

__all__ = ["quiet_unless_asked", "set_up_logging"]


def one_line(text: str) -> str:
    return " | ".join(part.strip() for part in text.splitlines() if part.strip())


class OneLine(logging.Formatter):
    """Keeps every message on one line, whatever it holds."""

    def format(self, record: logging.LogRecord) -> str:
        text = one_line(record.getMessage())
        if record.exc_info and record.exc_info[0] is not None:
            text += f" ({record.exc_info[0].__name__}: {one_line(str(record.exc_info[1]))})"
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"


class FileLine(logging.Formatter):
    """The same with UTC time, level and module; a traceback follows on lines of its own."""

    def converter(self, seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")


class TerminalHandler(logging.Handler):
    """Standard error as it is when the line is written, above a progress bar if one is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        write_line(self.format(record))


class LogFile(logging.FileHandler):
    """The file of ``--log-file``. One that takes nothing more, because its disk is full, ends itself with one line: the
    work that is logged goes on.

    Raises OSError where the file cannot be opened, a pipe that nobody reads among them, or where it is a device that
    takes nothing.
    """

    def _open(self) -> Any:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY"):
            flags |= getattr(os, name, 0)
        descriptor = os.open(self.baseFilename, flags, 0o666)
        try:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(descriptor, True)
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.write(descriptor, b"\n")
            return open(descriptor, "a", encoding=self.encoding, errors="backslashreplace")
        except BaseException:
            os.close(descriptor)
            raise

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logging.getLogger("strata").removeHandler(self)
        write_line(f"warning: --log-file {self.baseFilename} is written no further: {error.strerror}")

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # what waits to be written cannot be
            self.stream = None  # as ``logging`` leaves it


def quiet_unless_asked(requested: Requested) -> None:
    """For commands whose output is a table: only warnings reach the terminal unless a level was asked for."""
    if requested.origin("log_level") == "default":
        set_up_logging("warning", requested.log_file)


def set_up_logging(level: str, file: Path | None = None) -> None:
    """Sends the ``strata`` loggers to standard error at ``level`` and to ``file`` at debug. Replaces an earlier set-up.

    Raises ConfigError if the file cannot be opened.
    """
    logger = logging.getLogger("strata")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    terminal = TerminalHandler()
    terminal.setLevel(level.upper())
    terminal.setFormatter(OneLine())
    logger.addHandler(terminal)
    logger.setLevel(level.upper())
    if file is not None:
        try:
            to_file = LogFile(file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--log-file {file} cannot be opened: {error.strerror}", "name a file in a folder that you can write"
            ) from None
        to_file.setFormatter(FileLine())
        logger.addHandler(to_file)
        logger.setLevel(logging.DEBUG)
    logger.propagate = False
