"""What is said of an error that nobody named, whatever state the process is in: a line, a way out, a kept traceback.

Lives in ``cli`` because only the program's end needs it. Nothing here may raise: where memory has run out, writing the
traceback or even making the sentence can fail, and what is left is a line that was made before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from strata import version
from strata.cli.process_limits import WAY_OUT, describe_limits
from strata.errors import StrataError, lacks_memory
from strata.paths import find_home
from strata.words import with_program

__all__ = ["print_error", "tell_unexpected"]

NO_MEMORY = (
    b"strata: error: not enough memory\n  try: raise its limit (ulimit -v, ulimit -d), or close other programs\n"
)


def print_error(message: str, hint: str = "") -> None:
    """One line, and the way out as a second. Where standard error takes nothing, the status alone has to tell."""
    with contextlib.suppress(OSError):
        print(f"strata: error: {with_program(message)}", file=sys.stderr)
        if hint:
            print(f"  try: {with_program(hint)}", file=sys.stderr)


def tell_unexpected(error: BaseException) -> None:
    """Says an error in one line and a hint, and keeps its traceback, as far as the process still can."""
    try:
        path = keep_traceback(error)
        words = " ".join(str(error).split())
        if is_of_memory(error):
            told = "; ".join(filter(None, (words, describe_limits())))
            print_error(
                f"not enough memory{': ' if told else ''}{told}", f"{WAY_OUT}; {path} says where" if path else WAY_OUT
            )
            return
        where = f"report this with {path}, which says where" if path else "report this; its traceback cannot be kept"
        print_error(f"unexpected {type(error).__name__}: {words or 'no message'}", where)
    except Exception:  # noqa: BLE001 - memory, most likely: what the frames of the traceback hold is given back first
        error.__traceback__ = error.__context__ = None
        tell_with_little()


def tell_with_little() -> None:
    try:
        print_error(f"not enough memory; {describe_limits()}".removesuffix("; "), WAY_OUT)
    except Exception:  # noqa: BLE001 - the last line of all
        with contextlib.suppress(OSError):
            os.write(2, NO_MEMORY)


def is_of_memory(error: BaseException) -> bool:
    """Whether memory is what is missing, threads' stacks included: also of an error that another one covers."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return False
        if isinstance(seen, SystemError) and describe_limits():  # native code that failed without saying why
            return True
        if lacks_memory(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def keep_traceback(error: BaseException) -> Path | None:
    """Writes the traceback where a report can take it from: STRATA_HOME/logs, else the temporary folder. None where
    neither can be written or memory is short."""
    try:
        name = f"error-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.log"
        text = f"{described()}\n{' '.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
        try:
            home = find_home()
            path = home.make(home.logs) / name
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except (OSError, StrataError):
            path = Path(tempfile.gettempdir()) / f"strata-{name}"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except Exception:  # noqa: BLE001 - whatever it is, the error itself is to be told
        return None
    return path


def described() -> str:
    """Version and commit; asking git for that takes a process, which may be one too many."""
    try:
        return version.describe()
    except Exception:  # noqa: BLE001 - as above
        return f"strata {version.VERSION}"
