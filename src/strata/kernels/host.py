"""A device made of RAM: the whole engine on a PC with no GPU, and every way a device can fail, on purpose.

Lives beside ``backend.py`` because it is one of its implementations. Device memory is anonymous RAM under
a cap, a copy is a memcpy, an alias is the address itself, so native kernels compute on any tier in place.
``HostFaults`` makes it refuse page-locking, delay, reorder in time, lose or fail copies and answer late,
which is how each rule of ``memory`` and ``experts`` is tested in seconds. It must not know what an expert is.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from strata.errors import EngineError
from strata.kernels.backend import DeviceEvent, DeviceInfo, DeviceMemoryFull, PinRefused

__all__ = ["HostBackend", "HostBuffer", "HostFaults", "HostRegistration", "HostStatistics", "HostStream", "flip_bits"]

CopyTiming = Literal["at_once", "threaded", "last_moment"]

# The C library's memcpy, reached so that the interpreter's lock is released while it runs.
_libc = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
_memcpy: Callable[[int, int, int], int] = _libc.memcpy
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p


@dataclass(frozen=True)
class HostFaults:
    """What this device does wrong. The defaults are a device that never fails and copies at once.

    ``copies`` says when an enqueued copy really runs: ``at_once``; ``threaded``: a worker thread per stream, each
    copy after ``copy_delay_s``; ``last_moment``: only when somebody must wait for it, the latest a device may be.
    """

    refuse_one_allocation: bool = False  # page-locked, device-mapped allocations (path 1) are refused
    refuse_after_bytes: int | None = None  # page-locking beyond this many device-mapped bytes is refused
    refuse_at_slice: int | None = None  # the registration with this number (from 0) is refused, and all later ones
    poison_after_refusal: bool = False  # a registration tried after a refused one breaks the device for good
    pins_charge_device: bool = False  # page-locked bytes also count against the device's cap
    copies: CopyTiming = "at_once"
    copy_delay_s: float = 0.0
    fail_copies_after: int | None = None  # this many copies succeed, the others fail
    late_queries: int = 0  # an event says "not yet" this many times after it is complete


@dataclass(frozen=True)
class HostStatistics:
    """Counters of a ``HostBackend``; bytes unless named otherwise."""

    device_bytes: int
    pinned_bytes: int
    num_registrations: int
    num_refusals: int
    num_copies: int
    copied_bytes: int
    pageable_copies: int  # copies with one side on the device and the other neither there nor page-locked


def _anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed RAM of this process alone. In huge pages, where there are such: a drive that fills a buffer of scattered
    small ones took 240 ms for a round of reads that took 145."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


LOST = 0xA5  # every byte of memory that was lent


class HostBuffer:
    """RAM standing in for device memory or for one page-locked allocation. Freed once."""

    def __init__(self, nbytes: int, release: Callable[[HostBuffer], None]) -> None:
        self.nbytes = nbytes
        self._map: mmap.mmap | None = _anonymous(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._release = release

    def free(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
            self._release(self)

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            self.free()


class HostLendable(HostBuffer):
    """A buffer whose end can be lent; what lay there is overwritten, as it would be."""

    piece_bytes = 4096
    lent = 0

    def lend(self, nbytes: int) -> int:
        assert not self.lent, "memory is lent once at a time"
        self.lent = min(self.nbytes, -(-nbytes // self.piece_bytes) * self.piece_bytes)
        ctypes.memset(self.address + self.nbytes - self.lent, LOST, self.lent)
        return self.lent

    def take_back(self) -> None:
        self.lent = 0


class HostRegistration:
    """A range that counts as page-locked; its alias is itself."""

    def __init__(self, address: int, nbytes: int, release: Callable[[HostRegistration], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._release: Callable[[HostRegistration], None] | None = release

    def alias(self, address: int) -> int:
        assert self.address <= address < self.address + self.nbytes, "an alias outside its registration"
        return address

    def unregister(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release(self)


class HostEvent:
    """A point in a stream. ``late`` is how many more queries it denies after it is complete."""

    def __init__(self, stream: HostStream, late: int) -> None:
        self._stream = stream
        self._late = late
        self.done = threading.Event()
        self.error: str | None = None

    def query(self) -> bool:
        if not self.done.is_set() and self._late == 0:
            self._stream.nudge(self)
        if not self.done.is_set() or self._late > 0:
            self._late = max(0, self._late - 1)
            return False
        self._raise_error()
        return True

    def synchronize(self) -> None:
        self._stream.finish(self)
        self._late = 0
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise EngineError(self.error)


@dataclass(frozen=True)
class _Copy:
    destination: int
    source: int
    nbytes: int


class HostStream:
    """Copies, waits and events in the order they were enqueued."""

    def __init__(self, backend: HostBackend) -> None:
        self._backend = backend
        self._faults = backend.faults
        self._queue: deque[_Copy | DeviceEvent | HostEvent] = deque()
        self._changed = threading.Condition()
        self._running = threading.Lock()  # held by whoever runs the queue's head
        self._error: str | None = None
        self._closed = False
        self._worker: threading.Thread | None = None
        if self._faults.copies == "threaded":
            self._worker = threading.Thread(target=self._work, name="strata-host-stream", daemon=True)
            self._worker.start()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        assert destination, "a copy to address 0"
        assert source, "a copy from address 0"
        assert nbytes > 0, "a copy of no bytes"
        self._enqueue(_Copy(destination, source, nbytes))

    def record(self) -> HostEvent:
        event = HostEvent(self, self._faults.late_queries)
        self._enqueue(event)
        return event

    def wait(self, event: DeviceEvent) -> None:
        self._enqueue(_Wait(event))

    def synchronize(self) -> None:
        self.record().synchronize()

    def nudge(self, event: HostEvent) -> None:
        """A query in ``last_moment`` timing lets the device make progress, or polling would never end."""
        if self._faults.copies == "last_moment":
            self.finish(event)

    def finish(self, event: HostEvent) -> None:
        if self._worker is None:
            while not event.done.is_set() and self._run_next():
                pass
        event.done.wait()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        while self._run_next():
            pass

    def _enqueue(self, item: _Copy | DeviceEvent | HostEvent) -> None:
        with self._changed:
            assert not self._closed, "the stream is closed"
            self._queue.append(item)
            self._changed.notify_all()
        if self._faults.copies == "at_once":
            while self._run_next():
                pass

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
            self._run_next()

    def _run_next(self) -> bool:
        """Runs the head of the queue; False when it is empty."""
        with self._running:
            with self._changed:
                if not self._queue:
                    return False
                item = self._queue.popleft()
            if isinstance(item, HostEvent):
                item.error = self._error
                item.done.set()
                return True
            try:
                if isinstance(item, _Copy):
                    self._backend.run_copy(item.destination, item.source, item.nbytes)
                else:
                    item.synchronize()
            except EngineError as error:  # sticky, as on a real device: every later event of the stream reports it
                self._error = self._error or error.message
            return True


class _Wait:
    """Another stream's event as an item of this one's queue."""

    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


class PageLocks(Protocol):
    """How this system keeps memory in RAM. Both take an address and bytes, whole pages."""

    def lock(self, address: int, nbytes: int) -> None:
        """Raises ``PinRefused`` with the system's reason; then nothing of the range is locked."""

    def unlock(self, address: int, nbytes: int) -> None: ...


class _NoLocks:
    """Page-locking that is counted and not done: where only the rules around it matter."""

    def lock(self, address: int, nbytes: int) -> None: ...

    def unlock(self, address: int, nbytes: int) -> None: ...


class HostBackend:
    """``Backend`` over RAM. ``cap_bytes`` is all the memory this device has. ``locks`` really keeps page-locked memory
    in RAM, and may refuse; without it everything is granted that ``faults`` grants. See the module's page."""

    def __init__(self, cap_bytes: int, faults: HostFaults | None = None, locks: PageLocks | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.faults = faults or HostFaults()
        self._locks: PageLocks = locks or _NoLocks()
        self._lock = threading.RLock()  # of all that follows: a copy's pages may be locked by a thread of their own
        self._device: dict[int, int] = {}  # address -> bytes of each live buffer
        self._pins: dict[int, int] = {}
        self._unmapped: dict[int, int] = {}  # page-locked, but not addressed by the device
        self._streams: list[HostStream] = []
        self._num_registrations = 0
        self._num_refusals = 0
        self._refused_slice = False
        self._poisoned = False
        self._num_copies = 0
        self._copied_bytes = 0
        self._pageable_copies = 0

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            name="host RAM",
            kind="cpu",
            memory_total=self.cap_bytes,
            memory_free=self._free_bytes(),
            pins_charge_device=self.faults.pins_charge_device,
        )

    def allocate(self, nbytes: int) -> HostBuffer:
        self._check_poison()
        if nbytes <= 0 or nbytes > self._free_bytes():
            raise DeviceMemoryFull(nbytes, self._free_bytes())
        buffer = HostBuffer(nbytes, lambda freed: self._forget(self._device, freed.address))
        with self._lock:
            self._device[buffer.address] = nbytes
        return buffer

    def allocate_lendable(self, nbytes: int, piece_bytes: int) -> HostLendable:
        self._check_poison()
        if nbytes <= 0 or nbytes > self._free_bytes():
            raise DeviceMemoryFull(nbytes, self._free_bytes())
        buffer = HostLendable(nbytes, lambda freed: self._forget(self._device, freed.address))
        buffer.piece_bytes = piece_bytes
        with self._lock:
            self._device[buffer.address] = nbytes
        return buffer

    def allocate_pinned(self, nbytes: int, *, mapped: bool = True) -> tuple[HostBuffer, HostRegistration]:
        self._check_poison()
        if mapped and self.faults.refuse_one_allocation:
            raise self._refusal(nbytes, "one allocation of this size is not granted")
        self._check_pin_room(nbytes, mapped)
        live = self._pins if mapped else self._unmapped
        buffer = HostBuffer(nbytes, lambda freed: self._forget(live, freed.address))
        try:
            self._locks.lock(buffer.address, nbytes)
        except PinRefused as refused:
            buffer.free()
            raise self._refusal(nbytes, refused.reason) from refused
        with self._lock:
            live[buffer.address] = nbytes
        return buffer, HostRegistration(buffer.address, nbytes, self._unlock)

    def register(self, address: int, nbytes: int) -> HostRegistration:
        assert nbytes > 0, "a registration of zero bytes"
        assert address % mmap.PAGESIZE == 0, "registration works on whole pages"
        assert nbytes % mmap.PAGESIZE == 0, "registration works on whole pages"
        self._check_poison()
        with self._lock:
            number, self._num_registrations = self._num_registrations, self._num_registrations + 1
        if self._refused_slice and self.faults.poison_after_refusal:
            self._poisoned = True
            self._check_poison()
        if self.faults.refuse_at_slice is not None and number >= self.faults.refuse_at_slice:
            self._refuse_slice(nbytes, f"slice {number}")
        try:
            self._check_pin_room(nbytes, mapped=True)
        except PinRefused:
            self._refused_slice = True
            raise
        try:
            self._locks.lock(address, nbytes)
        except PinRefused as refused:
            self._refuse_slice(nbytes, refused.reason)
        with self._lock:
            self._pins[address] = nbytes

        def release(ended: HostRegistration) -> None:
            self._unlock(ended)
            self._forget(self._pins, ended.address)

        return HostRegistration(address, nbytes, release)

    def _unlock(self, ended: HostRegistration) -> None:
        self._locks.unlock(ended.address, ended.nbytes)

    def stream(self) -> HostStream:
        stream = HostStream(self)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def statistics(self) -> HostStatistics:
        with self._lock:
            return HostStatistics(
                device_bytes=sum(self._device.values()),
                pinned_bytes=sum(self._pins.values()) + sum(self._unmapped.values()),
                num_registrations=self._num_registrations,
                num_refusals=self._num_refusals,
                num_copies=self._num_copies,
                copied_bytes=self._copied_bytes,
                pageable_copies=self._pageable_copies,
            )

    def run_copy(self, destination: int, source: int, nbytes: int) -> None:
        """What a stream calls when a copy's turn has come."""
        self._check_poison()
        if self.faults.copy_delay_s:
            time.sleep(self.faults.copy_delay_s)
        with self._lock:
            number, self._num_copies = self._num_copies, self._num_copies + 1
            self._copied_bytes += nbytes
            live = (self._device, self._pins, self._unmapped)
            known = [any(_inside(ranges, address) for ranges in live) for address in (destination, source)]
            self._pageable_copies += not all(known)
        if self.faults.fail_copies_after is not None and number >= self.faults.fail_copies_after:
            raise EngineError(f"copy {number} of {nbytes} bytes failed on the device")
        _memcpy(destination, source, nbytes)

    def _free_bytes(self) -> int:
        with self._lock:
            used = sum(self._device.values())
            if self.faults.pins_charge_device:
                used += sum(self._pins.values()) + sum(self._unmapped.values())
            return self.cap_bytes - used

    def _check_pin_room(self, nbytes: int, mapped: bool) -> None:
        limit = self.faults.refuse_after_bytes
        with self._lock:
            pinned = sum(self._pins.values())
        if mapped and limit is not None and pinned + nbytes > limit:
            raise self._refusal(nbytes, f"{pinned} bytes are page-locked, {limit} is the limit")
        if self.faults.pins_charge_device and nbytes > (free := self._free_bytes()):
            raise self._refusal(nbytes, f"page-locked bytes count as device memory, {free} are free")

    def _refuse_slice(self, nbytes: int, reason: str) -> None:
        self._refused_slice = True
        raise self._refusal(nbytes, reason)

    def _refusal(self, nbytes: int, reason: str) -> PinRefused:
        with self._lock:
            self._num_refusals += 1
        return PinRefused(nbytes, reason)

    def _check_poison(self) -> None:
        if self._poisoned:
            raise EngineError("the device is broken: a registration was tried after a refused one")

    def _forget(self, live: dict[int, int], address: int) -> None:
        with self._lock:
            live.pop(address, None)


def _inside(live: dict[int, int], address: int) -> bool:
    return any(start <= address < start + nbytes for start, nbytes in live.items())


def flip_bits(address: int, mask: int) -> None:
    """Flips bits of one byte of this process's memory: damage made on purpose, for tests of what notices it."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= mask
