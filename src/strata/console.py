"""What the ``strata`` script starts: Ctrl-C ends with 130 and no traceback, from the first import to the last line.

Lives on top because it must be there before the command line is: importing that takes most of a short command's time,
and an interruption of the import would pass by everything that ``cli`` does about one. Knows nothing but the way there.
"""

from __future__ import annotations

import signal
import threading
from typing import NoReturn

__all__ = ["run"]


def run() -> NoReturn:
    """Runs the command of this process's arguments and exits with its status."""
    try:
        from strata.cli.app import main

        status = main()
    except KeyboardInterrupt:
        status = 130
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: only the interpreter's own end is left
    raise SystemExit(status)
