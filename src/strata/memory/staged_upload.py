"""Copies pageable RAM to a device through page-locked buffers, from many threads at once.

Lives in ``memory`` beside what measures the same way. What a driver stages by itself is one thread's copy, a fifth of
the link's rate. It must not know what is copied.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from queue import SimpleQueue

from strata.errors import EngineError
from strata.kernels.backend import DeviceEvent, DeviceStream

__all__ = ["StagedUpload"]

_LOOK_S = 0.001  # between two looks at what is still on its way when a load ends


class StagedUpload:
    """Borrows ``buffers``, addresses of ``buffer_bytes`` each, until it is closed and ``stream`` synchronized."""

    def __init__(self, stream: DeviceStream, buffers: Sequence[int], buffer_bytes: int) -> None:
        assert buffers, "an upload through no buffer"
        self._stream, self._buffer_bytes = stream, buffer_bytes
        self._num_buffers, self._closed = len(buffers), False
        self._buffers: SimpleQueue[tuple[int, DeviceEvent | None]] = SimpleQueue()
        for address in buffers:
            self._buffers.put((address, None))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies ``nbytes`` of RAM at ``source`` to device memory at ``target``. ``source`` may be overwritten after
        it; ``target`` holds them once the stream is synchronized. Any thread may call it. Raises ``EngineError`` once
        it is closed."""
        for at in range(0, nbytes, self._buffer_bytes):
            count = min(self._buffer_bytes, nbytes - at)
            buffer, event = self._buffers.get()
            if self._closed:
                self._buffers.put((buffer, event))
                raise EngineError("the load has ended: nothing more goes to the device")
            try:
                if event is not None:
                    event.synchronize()
                ctypes.memmove(buffer, source + at, count)
                self._stream.copy(target + at, buffer, count)
                event = self._stream.record()
            finally:
                self._buffers.put((buffer, event))

    def close(self) -> None:
        """Waits until no thread writes to a buffer, whatever interrupts the wait: threads of a load that was
        interrupted may still be on their way, and the buffers are freed next. May be called twice."""
        self._closed = True  # whoever takes a buffer from here on puts it back
        interruption: BaseException | None = None
        while True:
            try:
                while self._buffers.qsize() < self._num_buffers:
                    time.sleep(_LOOK_S)
                break
            except KeyboardInterrupt as pressed:
                interruption = pressed
        if interruption is not None:
            raise interruption
