"""Native threads that copy blobs, read them from files, or compute them, each job on a ticket (``csrc/cpu/stager.h``).

Lives beside the other native bindings. The caller keeps both ends of a job valid until its ticket is complete. It
must not know what a blob is or which tier it came from.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

from strata.errors import EngineError
from strata.kernels.cpu.library import declare, library

__all__ = ["ReadFailure", "Stager"]

_DONE, _PENDING, _TRUNCATED, _DAMAGED, _REFUSED = 0, -1, -2, -3, -4
_FILL_WORDS = 8


class ReadFailure(Exception):  # noqa: N818 - the caller knows the file's name and turns this into its own error
    """A read that did not bring the bytes: ``reason`` is 'truncated', 'damaged' or the system's own words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Calls(NamedTuple):
    copy: ctypes._NamedFuncPointer
    read: ctypes._NamedFuncPointer
    compute: ctypes._NamedFuncPointer
    query: ctypes._NamedFuncPointer
    wait: ctypes._NamedFuncPointer


class Stager:
    """A pool of ``num_threads`` threads. Tickets are integers; a failed one raises when asked for."""

    def __init__(self, num_threads: int) -> None:
        create = declare("strata_stager_create", ctypes.c_int, returns=ctypes.c_void_p)
        self._handle: int | None = create(num_threads)
        if not self._handle:
            raise EngineError(
                (library().strata_last_error() or b"the stager cannot start").decode(),
                "raise the limit on memory or threads (ulimit -v, ulimit -u), or lower STRATA_STAGER_THREADS",
            )
        pointer, size, u64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        self._calls = _Calls(
            declare("strata_stager_copy", pointer, pointer, pointer, size, ctypes.c_int, returns=u64),
            declare("strata_stager_read", pointer, ctypes.c_int, u64, pointer, size, ctypes.c_int, u64, returns=u64),
            declare("strata_stager_compute", pointer, pointer, pointer, pointer, size, returns=u64),
            declare("strata_stager_query", pointer, u64),
            declare("strata_stager_wait", pointer, u64),
        )
        self.num_threads = num_threads

    def copy(self, target: int, source: int, nbytes: int, *, bypass_cache: bool = True) -> int:
        """Starts a copy between addresses; the ticket."""
        return int(self._calls.copy(self._handle, target, source, nbytes, bypass_cache))

    def read(self, descriptor: int, offset: int, target: int, nbytes: int, checksum: int | None = None) -> int:
        """Starts a read of a file into memory, verified when ``checksum`` is given; the ticket."""
        checked = checksum is not None
        return int(self._calls.read(self._handle, descriptor, offset, target, nbytes, checked, checksum or 0))

    def compute(self, fill: int, recipe: Sequence[int], target: int, nbytes: int) -> int:
        """Starts computing bytes: ``fill`` is the address of a ``StrataFill`` (stager.h); the ticket."""
        words = (ctypes.c_uint64 * _FILL_WORDS)(*recipe)
        return int(self._calls.compute(self._handle, fill, words, target, nbytes))

    def query(self, ticket: int) -> bool:
        """True once the job is complete. Raises ``ReadFailure`` if it failed."""
        return self._settle(self._calls.query(self._handle, ticket))

    def wait(self, ticket: int) -> None:
        """Blocks until the job is complete. Raises ``ReadFailure`` if it failed."""
        self._settle(self._calls.wait(self._handle, ticket))

    def close(self) -> None:
        """Finishes all jobs and ends the threads."""
        if self._handle:
            declare("strata_stager_destroy", ctypes.c_void_p, returns=None)(self._handle)
            self._handle = None

    @staticmethod
    def _settle(state: int) -> bool:
        if state == _DONE:
            return True
        if state == _PENDING:
            return False
        if state == _TRUNCATED:
            raise ReadFailure("truncated")
        if state == _REFUSED:
            raise ReadFailure("it cannot be computed")
        raise ReadFailure("damaged" if state == _DAMAGED else os.strerror(state))
