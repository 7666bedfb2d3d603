"""Copies pageable RAM to a device through page-locked buffers, from many threads at once.

Lives in ``memory`` beside what measures the same way. What a driver stages by itself is one thread's copy, a fifth of
the link's rate. It must not know what is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from queue import SimpleQueue

from strata.kernels.backend import DeviceEvent, DeviceStream

__all__ = ["StagedUpload"]


class StagedUpload:
    """Borrows ``buffers``, addresses of ``buffer_bytes`` each, until ``stream`` is synchronized after the last copy."""

    def __init__(self, stream: DeviceStream, buffers: Sequence[int], buffer_bytes: int) -> None:
        assert buffers, "an upload through no buffer"
        self._stream, self._buffer_bytes = stream, buffer_bytes
        self._buffers: SimpleQueue[tuple[int, DeviceEvent | None]] = SimpleQueue()
        for address in buffers:
            self._buffers.put((address, None))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies ``nbytes`` of RAM at ``source`` to device memory at ``target``. ``source`` may be overwritten after
        it; ``target`` holds them once the stream is synchronized. Any thread may call it."""
        for at in range(0, nbytes, self._buffer_bytes):
            count = min(self._buffer_bytes, nbytes - at)
            buffer, event = self._buffers.get()
            try:
                if event is not None:
                    event.synchronize()
                ctypes.memmove(buffer, source + at, count)
                self._stream.copy(target + at, buffer, count)
                event = self._stream.record()
            finally:
                self._buffers.put((buffer, event))
