"""Has the operating system read a file into its page cache before anybody asks for it, so that the drive is never idle.

Lives in ``memory`` because page caches are the operating system's. What is read ahead is a hint: where the system takes
none, or the file is gone, whoever reads it afterwards reads it as always. It must not know what the file holds.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from strata.files import open_regular
from strata.memory.system import system

__all__ = ["ReadAhead"]

PIECE_BYTES = 512 << 10  # Linux takes no more of one hint than a drive's own largest request (cpu2: 4 MiB)
DISTANCE_BYTES = 1 << 30  # ahead of the reader: what a drive gives while a card is opened, and not all of a small RAM


class ReadAhead:
    """Reads ``path`` ahead, from its first byte on, in a thread of its own; None: nothing. Close it; twice is fine.

    Whoever reads the file says how far it has come by ``reached``. The pages are the page cache's, which gives them up
    for anything else.
    """

    def __init__(self, path: Path | None, distance: int = DISTANCE_BYTES) -> None:
        self._path, self._distance = path, distance
        self._changed = threading.Condition()
        self._reached, self._ended = 0, False
        self._thread = threading.Thread(target=self._run, name="strata-read-ahead", daemon=True)
        if path is not None:
            with suppress(RuntimeError):  # no thread is to be had
                self._thread.start()

    def close(self) -> None:
        """Nothing more is read ahead."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def reached(self, nbytes: int) -> None:
        """The first ``nbytes`` of the file were read."""
        with self._changed:
            self._reached = nbytes
            self._changed.notify_all()

    def _run(self) -> None:
        assert self._path is not None
        try:
            with os.fdopen(open_regular(self._path), "rb", buffering=0) as file:
                end = os.fstat(file.fileno()).st_size
                for at in range(0, end, PIECE_BYTES):
                    if not self._may_read(at) or not system.read_ahead(file.fileno(), at, min(PIECE_BYTES, end - at)):
                        return
        except OSError:
            return  # its reader says what is wrong with it

    def _may_read(self, at: int) -> bool:
        """Blocks until the reader has come near ``at``; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or at < self._reached + self._distance)
            return not self._ended
