"""Device memory whose end is given to somebody else for a while: an address range that keeps its place while the memory
behind it goes and comes.

Lives beside ``backend`` because the driver maps physical memory to addresses. What lay in a lent range is lost; its
addresses are valid again once it was taken back. It must not know who borrows, nor what lies in it. Decision record
0135.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.kernels.cuda.driver import CudaContext, ask

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["MappedRange"]


class MappedRange:
    """``nbytes`` of device memory in pieces of ``piece_bytes`` counted from the end. Freed once."""

    def __init__(self, context: CudaContext, nbytes: int, piece_bytes: int) -> None:
        """Raises ``CudaError``; nothing stays taken then."""
        self._context = context
        driver: ModuleType = context.driver
        context.use()
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = context.card.index
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step: int = ask(driver.cuMemGetAllocationGranularity(self._properties, least), "asking how VRAM is mapped")
        self._piece: int = -(-piece_bytes // step) * step
        self.nbytes: int = -(-nbytes // step) * step
        self._lent = 0
        self._handles: dict[int, Any] = {}  # by offset of the piece
        self.address = int(ask(driver.cuMemAddressReserve(self.nbytes, 0, 0, 0), f"reserving {nbytes} addresses"))
        try:
            self._map(0, self.nbytes)
        except BaseException:
            self.free()
            raise

    def lend(self, nbytes: int) -> int:
        """Gives at least ``nbytes`` at the end back to the driver, whole pieces; how many. Nothing uses them."""
        assert not self._lent, "memory is lent once at a time"
        count: int = min(self.nbytes, -(-nbytes // self._piece) * self._piece)
        self._context.use()
        ask(self._context.driver.cuCtxSynchronize(), "work on the card")
        self._unmap(self.nbytes - count)
        self._lent = count
        return count

    def take_back(self) -> None:
        """Memory is behind the lent addresses again. Raises ``CudaError``, and they stay lent, where none is free."""
        self._map(self.nbytes - self._lent, self.nbytes)
        self._lent = 0

    def free(self) -> None:
        self._context.use()
        self._unmap(0)
        ask(self._context.driver.cuMemAddressFree(self.address, self.nbytes), f"freeing {self.nbytes} addresses")

    def _offsets(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every piece; the first one is what is left of whole ones."""
        first = self.nbytes % self._piece
        starts = range(first, self.nbytes, self._piece)
        return ([(0, first)] if first else []) + [(start, self._piece) for start in starts]

    def _map(self, first: int, stop: int) -> None:
        driver = self._context.driver
        self._context.use()
        try:
            for offset, count in self._offsets():
                if not first <= offset < stop:
                    continue
                handle = ask(driver.cuMemCreate(count, self._properties, 0), f"taking {count} bytes of VRAM")
                try:
                    ask(driver.cuMemMap(self.address + offset, count, 0, handle, 0), f"mapping {count} bytes of VRAM")
                except BaseException:
                    driver.cuMemRelease(handle)
                    raise
                self._handles[offset] = handle
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self._context.card.index
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            answer = driver.cuMemSetAccess(self.address + first, stop - first, [access], 1)
            ask(answer, f"opening {stop - first} bytes of VRAM")
        except BaseException:
            self._unmap(first)
            raise

    def _unmap(self, first: int) -> None:
        driver = self._context.driver
        for offset, count in self._offsets():
            if offset >= first and offset in self._handles:
                ask(driver.cuMemUnmap(self.address + offset, count), f"unmapping {count} bytes of VRAM")
                ask(driver.cuMemRelease(self._handles.pop(offset)), f"giving {count} bytes of VRAM back")
