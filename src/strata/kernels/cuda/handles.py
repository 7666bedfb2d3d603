"""What a card's backend hands out: buffers, registrations, charges, events and streams.

Lives beside ``backend``, which makes them and counts what they hold; each gives itself back once. They must not know a
cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from strata.kernels.backend import DeviceEvent, DeviceMemoryFull
from strata.kernels.cuda.driver import CudaError, ask

if TYPE_CHECKING:
    from strata.kernels.cuda.backend import CudaBackend
    from strata.kernels.cuda.lendable import MappedRange

__all__ = ["Charge", "CudaBuffer", "CudaEvent", "CudaLendable", "CudaRegistration", "CudaStream"]

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
NOT_READY = "CUDA_ERROR_NOT_READY"


class CudaBuffer:
    """Device memory, or one page-locked allocation. Freed once, at ``free()`` or when it is collected."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._release: Callable[[], None] | None = release

    def free(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __del__(self) -> None:
        if getattr(self, "_release", None) is not None:
            self.free()


class CudaLendable(CudaBuffer):
    """Device memory whose end torch may have for a while."""

    def __init__(self, mapped: MappedRange, nbytes: int, release: Callable[[], None], backend: CudaBackend) -> None:
        super().__init__(mapped.address, nbytes, release)
        self._mapped, self._backend, self._lent = mapped, backend, 0

    def lend(self, nbytes: int) -> int:
        count: int = self._mapped.lend(nbytes)
        self._lent = count
        self._backend.lend_to_torch(count)
        return count - (self._mapped.nbytes - self.nbytes)

    def free(self) -> None:
        if self._lent:
            lent, self._lent = self._lent, 0
            self._backend.take_from_torch(lent)
        super().free()

    def take_back(self) -> None:
        self._backend.take_from_torch(self._lent)
        try:
            self._mapped.take_back()
        except CudaError as error:
            self._backend.lend_to_torch(self._lent)
            if error.name == OUT_OF_MEMORY:
                raise DeviceMemoryFull(self._lent, self._backend.info().memory_free) from None
            raise
        self._lent = 0


class CudaRegistration:
    """A page-locked range; ``alias`` is where the device sees it."""

    def __init__(self, address: int, nbytes: int, device_address: int | None, release: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._device_address = device_address
        self._release: Callable[[], None] | None = release

    def alias(self, address: int) -> int:
        assert self._device_address is not None, "the device does not address this range"
        assert self.address <= address < self.address + self.nbytes, "an alias outside its registration"
        return self._device_address + (address - self.address)

    def unregister(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()


class Charge:
    """Bytes of the cap that something else allocates, such as torch. Given back once."""

    def __init__(self, nbytes: int, release: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()


class CudaEvent:
    """A point in a stream, without a time. Its handle returns to the backend when it is collected."""

    def __init__(self, backend: CudaBackend, handle: Any) -> None:
        self._backend = backend
        self.handle = handle

    def query(self) -> bool:
        context = self._backend.context
        context.use()
        answer = context.driver.cuEventQuery(self.handle)
        if answer[0].name == NOT_READY:
            return False
        ask(answer, "work on the card")
        return True

    def synchronize(self) -> None:
        context = self._backend.context
        context.use()
        ask(context.driver.cuEventSynchronize(self.handle), "work on the card")

    def __del__(self) -> None:
        self._backend.recycle(self.handle)


class CudaStream:
    """A stream that no other stream waits for by itself. Copies are ordered; page-locked ones run beside kernels."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        context = backend.context
        context.use()
        flags = context.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = ask(context.driver.cuStreamCreate(int(flags)), "making a stream")

    @property
    def handle(self) -> int:
        """The CUstream as an integer."""
        return int(self._stream)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        assert destination, "a copy to address 0"
        assert source, "a copy from address 0"
        assert nbytes > 0, "a copy of no bytes"
        context = self._backend.context
        context.use()
        for at, count in self._backend.pieces(destination, source, nbytes):
            answer = context.driver.cuMemcpyAsync(destination + at, source + at, count, self._stream)
            ask(answer, f"copying {count} bytes")
        self._backend.count_copies(1, nbytes)

    def copy_batch(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Enqueues (destination, source, bytes) triples in one call; they may run in any order among themselves."""
        copies = [
            (destination + at, source + at, count)
            for destination, source, nbytes in copies
            for at, count in self._backend.pieces(destination, source, nbytes)
        ]
        if len(copies) < 2:
            for copy in copies:
                self.copy(*copy)
            return
        context = self._backend.context
        context.use()
        driver = context.driver
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        destinations = [driver.CUdeviceptr(destination) for destination, _, _ in copies]
        sources = [driver.CUdeviceptr(source) for _, source, _ in copies]
        sizes = [nbytes for _, _, nbytes in copies]
        assert all(sizes), "a copy of no bytes"
        answer = driver.cuMemcpyBatchAsync(
            destinations, sources, sizes, len(copies), [attributes], [0], 1, self._stream
        )
        ask(answer, f"copying {sum(sizes)} bytes in {len(copies)} pieces")
        self._backend.count_copies(len(copies), sum(sizes))

    def record(self) -> CudaEvent:
        event = self._backend.event()
        ask(self._backend.context.driver.cuEventRecord(event.handle, self._stream), "recording an event")
        return event

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent), "an event of another device"
        self._backend.context.use()
        ask(self._backend.context.driver.cuStreamWaitEvent(self._stream, event.handle, 0), "waiting for an event")

    def synchronize(self) -> None:
        self._backend.context.use()
        ask(self._backend.context.driver.cuStreamSynchronize(self._stream), "work on the card")

    def close(self) -> None:
        """Waits for the stream's work and ends it; what failed was already reported to whoever waited for it."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._backend.context.use()
            self._backend.context.driver.cuStreamSynchronize(stream)
            self._backend.context.driver.cuStreamDestroy(stream)
