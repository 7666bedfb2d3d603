"""A card's context, opened in a thread while Python imports what a load needs: 0.4 s of a start (h200).

Lives in ``kernels/cuda`` beside ``driver`` and imports as little. What goes wrong here is told by whoever opens the
card afterwards. It must not know what is imported meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from strata.errors import StrataError
from strata.kernels.cuda.driver import ask, bindings, start

__all__ = ["EarlyStart"]


class EarlyStart:
    """A block in which the context of card ``index`` is being opened, or open; None: nothing is. It is the one that
    everybody shares, so it stays while others hold it."""

    def __init__(self, index: int | None) -> None:
        self._index = index
        self._device: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._index is None:
            return
        with suppress(StrataError, RuntimeError):  # no package, or no thread to be had
            bindings("driver")  # by this thread, so that no two threads wait for each other's imports
            thread = threading.Thread(target=self._open, args=(self._index,), name="strata-card", daemon=True)
            thread.start()
            self._thread = thread

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._thread.join()
        if self._device is not None:
            with suppress(StrataError):
                ask(start()[0].cuDevicePrimaryCtxRelease(self._device), "closing a card")

    def _open(self, index: int) -> None:
        with suppress(StrataError):
            driver, _ = start()
            device = ask(driver.cuDeviceGet(index), "opening a card")
            ask(driver.cuDevicePrimaryCtxRetain(device), "opening a context")
            self._device = device
