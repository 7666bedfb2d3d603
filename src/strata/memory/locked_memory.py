"""RAM for the copy of a model's experts, which may still be being page-locked while its first places are filled.

Lives in ``memory`` beside ``page_lock``, which does the locking, and knows of it only how far it has come. One thread
locks and tells; others wait. What lies in a place it must not know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.kernels.backend import Buffer, Registration
from strata.memory.system import system

__all__ = ["LockedMemory", "Slice"]


@dataclass(frozen=True)
class Slice:
    """A registered part of a copy: whole pages shared with no other slice."""

    offset: int
    nbytes: int
    registration: Registration


class LockedMemory:
    """RAM for ``num_places`` experts of ``stride`` bytes, some of it page-locked. Owned by whoever took it.

    ``aliases`` holds for each place its address as the device sees it, 0 where no slice holds the place whole (the CPU
    computes it in rounds, the stager copies it in prompts). A place's alias is final, and the place may be written,
    once ``wait_for`` has let it through; ``path`` (1, 2 or 3), ``slices``, ``report`` and the times are final after
    ``settle``. Beside others nothing is registered before somebody waits: a driver that registers lets nobody else in,
    and what a load does before has calls of its own.
    """

    def __init__(self, buffer: Buffer | system.Region, num_places: int, stride: int) -> None:
        self._buffer = buffer
        self.address = buffer.address
        self.nbytes = num_places * stride
        self.num_places = num_places
        self.stride = stride
        self.aliases = np.zeros(num_places, np.uint64)
        self.slices: tuple[Slice, ...] = ()
        self.path = 3
        self.report = ""
        self.began = self.ended = time.perf_counter()  # of taking and page-locking it, as far as somebody waited
        self._changed = threading.Condition()
        self._open_places = 0
        self._finished = False
        self._error: BaseException | None = None
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of places that are page-locked whole."""
        return int(np.count_nonzero(self.aliases)) * self.stride

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def wait_for(self, place: int) -> int:
        """Blocks until ``place`` may be written; the number of places, from the first on, that may be by then.

        Raises what ended the locking.
        """
        self.want()
        with self._changed:
            self._changed.wait_for(lambda: place < self._open_places or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._open_places

    def settle(self) -> None:
        """Blocks until all is page-locked that will be. Raises what ended the locking."""
        self.want()
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error is not None)
            if self._error is not None:
                raise self._error
        self._join()

    def close(self) -> None:
        """Ends the locking, unregisters, then frees. Nothing may be copying from or to it."""
        self._closing.set()
        self._wanted.set()
        self._join()
        for part in self.slices:
            part.registration.unregister()
        self.slices = ()
        self._buffer.free()

    def _join(self) -> None:
        if self._thread is not None and self._thread.ident is not None:  # a thread that could not start has none
            self._thread.join()

    # For whoever locks -----------------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Nothing more is wanted: the locking ends here."""
        return self._closing.is_set()

    def lock_beside(self, lock: Callable[[], None]) -> None:
        """Runs ``lock`` in a thread of its own, which ``settle`` and ``close`` await; waiters get what it raises."""

        def run() -> None:
            try:
                lock()
            except BaseException as error:  # noqa: BLE001 - waiters get it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

        self._thread = threading.Thread(target=run, name="strata-page-lock")
        self._thread.start()

    def want(self) -> None:
        """Somebody waits, or will."""
        self._wanted.set()

    def await_demand(self) -> None:
        """Blocks until somebody waits for a place, or nothing more is wanted. Until then nobody was delayed."""
        if not self._wanted.is_set():
            self._wanted.wait()
            self.began = time.perf_counter()

    def grant(self, part: Slice) -> None:
        """``part`` is registered: aliases of the places that it holds whole."""
        self.slices = (*self.slices, part)
        first = -(-part.offset // self.stride)
        end = min(self.num_places, (part.offset + part.nbytes) // self.stride)
        if end > first:
            base = part.registration.alias(self.address + first * self.stride)
            self.aliases[first:end] = base + np.arange(end - first, dtype=np.uint64) * np.uint64(self.stride)

    def open_below(self, offset: int) -> None:
        """Nothing below ``offset`` will be registered any more: places that end there may be written."""
        with self._changed:
            self._open_places = min(self.num_places, offset // self.stride)
            self._changed.notify_all()

    def finish(self, path: int, report: str, ended: float) -> None:
        """Nothing will be registered any more."""
        self.path, self.report, self.ended = path, report, ended
        with self._changed:
            self._open_places = self.num_places
            self._finished = True
            self._changed.notify_all()
