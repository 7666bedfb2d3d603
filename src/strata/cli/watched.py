"""A program within tight limits, watched by a second process: what ends without a word gets one.

Lives in ``cli`` and imports next to nothing, since it comes before everything that is heavy. The C library, its loader
and libraries for linear algebra end a process where memory for a thread is missing: none of its code runs any more.
Where limits of memory are in force, another process is left to say so (decision record 0125).
"""

from __future__ import annotations

import os
import signal

from strata.cli.process_limits import WAY_OUT, describe_limits

__all__ = ["fork_watched"]

OWN_STATUSES = (0, 1, 2, 130, 141)  # of a program that said what was to be said


def fork_watched() -> None:
    """Returns in a new process, where the program goes on. The one before waits, hands signals on, and ends with its
    status; it says that memory was too little where the program was ended by something else than itself.

    Does nothing where no limit of memory is in force, and where there is no room for a process. Call it while there is
    one thread.
    """
    limits = describe_limits()
    if not limits or not hasattr(signal, "sigwaitinfo"):
        return
    handed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handed_on | {signal.SIGCHLD})
    try:
        child = os.fork()
    except OSError:
        child = 0
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_watch(child, handed_on, limits))


def _watch(child: int, handed_on: set[signal.Signals], limits: str) -> int:
    while True:
        heard = signal.sigwaitinfo(handed_on | {signal.SIGCHLD})
        if heard.si_signo != signal.SIGCHLD:
            if heard.si_code <= 0:  # sent to this process alone; those of a terminal reach both
                os.kill(child, heard.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended == child:
            break
    code = os.waitstatus_to_exitcode(status)
    if code in OWN_STATUSES:
        return code
    if code < 0 and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        return 128 - code  # as a shell says it
    how = f"signal {-code}" if code < 0 else f"status {code}"
    line = f"strata: error: not enough memory: the program was ended by {how}; {limits}\n  try: {WAY_OUT}\n"
    os.write(2, line.encode())
    return 1
