"""How long tests wait for what is to happen anyway: on a machine that is busy with other things, too.

A bound says that something happens at all and not how fast; what must not happen would take far longer or for ever.
"""

from __future__ import annotations

import signal
import subprocess

__all__ = ["PATIENCE_S", "end_by"]

PATIENCE_S = 120.0
AGAIN_S = 20.0


def end_by(process: subprocess.Popen[str], number: int = signal.SIGINT) -> int:
    """Sends the signal until the process has ended; its status.

    Python looks at signals between its own instructions: one that comes after the last look before a system call is
    noticed when that call ends, which may be never. Then another one is what a user would send, too.
    """
    for _ in range(int(PATIENCE_S / AGAIN_S)):
        process.send_signal(number)
        try:
            return process.wait(AGAIN_S)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"signal {number} does not end it")
