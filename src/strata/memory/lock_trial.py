"""Which way locks pages faster here: one page-locked allocation, or slices of memory that several threads have touched.

Lives in ``memory`` beside ``page_lock``, whose first two paths these are; a driver decides what each costs (on the
h200 1.8 against 20 to 38 GiB/s). A trial takes a tenth of a second and leaves nothing taken. It must not know what is
locked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from strata.kernels.backend import Backend, PinRefused
from strata.memory.system import system
from strata.memory.touching import Touching

__all__ = ["LEAST_COPY", "LockTrial", "try_both"]

GIB = 1 << 30
TRIAL_BYTES = 128 << 20
LEAST_COPY = 4 * GIB  # below it even the slower way takes hardly longer than a trial is worth
_CLEARLY = 2.0  # so many times as fast: the documented order is left for no less


@dataclass(frozen=True)
class LockTrial:
    """GiB/s of both ways, over a small piece. ``slices`` 0: registering was refused, and is not tried again."""

    one_allocation: float
    slices: float

    @property
    def registers(self) -> bool:
        return self.slices > 0

    @property
    def slices_first(self) -> bool:
        return self.slices > _CLEARLY * self.one_allocation

    def words(self) -> str:
        return f"{self.one_allocation:.1f} against {self.slices:.1f} GiB/s in a trial"


def try_both(backend: Backend, num_threads: int, huge_pages: bool) -> LockTrial | None:
    """None on what is no card, where page-locked bytes count as the card's own, and where there is no memory for it."""
    info = backend.info()
    if info.kind != "cuda" or info.pins_charge_device:
        return None
    try:
        one = _rate_of_one_allocation(backend)
        try:
            return LockTrial(one, _rate_of_slices(backend, num_threads, huge_pages))
        except PinRefused:
            return LockTrial(one, 0.0)
    except (PinRefused, MemoryError):
        return None  # the copy itself will be answered in the documented order


def _rate_of_one_allocation(backend: Backend) -> float:
    began = time.perf_counter()
    buffer, registration = backend.allocate_pinned(TRIAL_BYTES)
    seconds = time.perf_counter() - began
    registration.unregister()
    buffer.free()
    return TRIAL_BYTES / GIB / max(seconds, 1e-9)


def _rate_of_slices(backend: Backend, num_threads: int, huge_pages: bool) -> float:
    region = system.map_region(TRIAL_BYTES, huge_pages=huge_pages)
    try:
        began = time.perf_counter()
        with Touching([(region.address, TRIAL_BYTES)], num_threads) as touching:
            touching.wait(0)
            registration = backend.register(region.address, TRIAL_BYTES)
        seconds = time.perf_counter() - began
        registration.unregister()
    finally:
        region.free()
    return TRIAL_BYTES / GIB / max(seconds, 1e-9)
