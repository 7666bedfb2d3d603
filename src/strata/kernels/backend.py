"""The one seam to a device: memory, page-locking, streams, events and copies.

Lives in ``kernels`` because only this room knows concrete backends. ``HostBackend`` (host.py) runs the
whole engine with no GPU and can fail on purpose; ``CudaBackend`` is the real one. Nothing here knows
what an expert is. Every address is a plain integer so that native code and ctypes share it; a
``Buffer`` owns its bytes and frees them once, at ``free()`` or when it is collected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Backend",
    "Buffer",
    "DeviceEvent",
    "DeviceInfo",
    "DeviceMemoryFull",
    "DeviceStream",
    "LendableBuffer",
    "PinRefused",
    "Registration",
]


class DeviceMemoryFull(Exception):  # noqa: N818 - a state the caller plans for, not a mistake
    """A device allocation did not fit under the cap. ``asked`` and ``free`` are bytes."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} bytes asked, {free} free")
        self.asked = asked
        self.free = free


class PinRefused(Exception):  # noqa: N818 - an answer the caller works with, not a mistake
    """The driver refused to page-lock a range. ``asked`` is bytes. Never leaves a sticky error."""

    def __init__(self, asked: int, reason: str) -> None:
        super().__init__(f"{asked} bytes: {reason}")
        self.asked = asked
        self.reason = reason


class Buffer(Protocol):
    """A contiguous range of bytes. ``address`` is aligned to at least 4,096 bytes."""

    address: int
    nbytes: int

    def free(self) -> None: ...


class LendableBuffer(Buffer, Protocol):
    """A buffer whose end somebody else may have for a while: on a card torch, for its tensors."""

    def lend(self, nbytes: int) -> int:
        """Gives up at least ``nbytes`` at the end, which nothing uses any more; how many. Their contents are lost."""

    def take_back(self) -> None:
        """The lent range is valid again. Raises ``DeviceMemoryFull`` where it cannot be yet: it stays lent."""


class Registration(Protocol):
    """A page-locked host range. ``alias(address)`` is its address as the device sees it."""

    address: int
    nbytes: int

    def alias(self, address: int) -> int: ...

    def unregister(self) -> None: ...


class DeviceEvent(Protocol):
    def query(self) -> bool:
        """True once all work before the event is complete; raises ``EngineError`` if a copy before it failed."""

    def synchronize(self) -> None:
        """Blocks until complete; raises ``EngineError`` if a copy before it failed."""


class DeviceStream(Protocol):
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueues a copy in order on this stream. Both ranges must stay valid until an event after it."""

    def record(self) -> DeviceEvent: ...

    def wait(self, event: DeviceEvent) -> None:
        """Work enqueued later on this stream starts after ``event``."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself; bytes. ``kind`` is 'cpu' (its memory is RAM) or 'cuda'."""

    name: str
    kind: str
    memory_total: int
    memory_free: int
    pins_charge_device: bool = False  # page-locked bytes also come off ``memory_free``


class Backend(Protocol):
    """What the memory and experts rooms may ask of a device."""

    def info(self) -> DeviceInfo: ...

    def allocate(self, nbytes: int) -> Buffer:
        """Device memory under the cap. Raises ``DeviceMemoryFull``."""

    def allocate_lendable(self, nbytes: int, piece_bytes: int) -> LendableBuffer:
        """As ``allocate``; its end can be lent in pieces of ``piece_bytes``."""

    def allocate_pinned(self, nbytes: int, *, mapped: bool = True) -> tuple[Buffer, Registration]:
        """One page-locked, portable allocation. Raises ``PinRefused``.

        ``mapped``: the device can address it (path 1 of the expert copy); a staging buffer is only copied from.
        """

    def register(self, address: int, nbytes: int) -> Registration:
        """Page-locks existing whole pages (path 2). Zero bytes is the caller's mistake. Raises ``PinRefused``."""

    def stream(self) -> DeviceStream: ...

    def close(self) -> None:
        """Ends the streams. Buffers and registrations are their owners' to free."""
