"""What the ``strata`` script starts: Ctrl-C ends with 130 and no traceback, from the first line to the last.

Lives on top because it must be there before the command line is: importing that takes most of a short command's time,
and an interruption of the import would pass by everything that ``cli`` does about one. Knows nothing but the way there.
"""

from __future__ import annotations

import os

from strata import collector, interrupts

TYPE_CHECKING = False  # that of ``typing`` takes longer to import than what must come first
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["run"]


def run() -> NoReturn:
    """Runs the command of this process's arguments and exits with its status."""
    interrupts.begin()
    collector.pause()
    try:
        from strata.cli.watched import fork_watched

        fork_watched()
        from strata.cli.app import main

        status = main()
    except KeyboardInterrupt:
        interrupts.end()
        status = interrupts.STATUS
    except MemoryError:  # of the import; what comes after it tells its own
        os.write(2, b"strata: error: not enough memory to start\n  try: raise its limit (ulimit -v, ulimit -d)\n")
        status = 1
    interrupts.end()
    raise SystemExit(status)
