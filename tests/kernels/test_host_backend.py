"""The faults of HostBackend themselves: a test that relies on one must be able to trust it."""

from __future__ import annotations

import ctypes
import time

import pytest

from strata.errors import EngineError
from strata.kernels.backend import DeviceMemoryFull, PinRefused
from strata.kernels.host import HostBackend, HostBuffer, HostFaults

PAGE = 4096


def fill(buffer: HostBuffer, value: int) -> None:
    ctypes.memset(buffer.address, value, buffer.nbytes)


def first(buffer: HostBuffer) -> int:
    return ctypes.string_at(buffer.address, 1)[0]


def pair(backend: HostBackend) -> tuple[HostBuffer, HostBuffer]:
    source, target = backend.allocate(PAGE), backend.allocate(PAGE)
    fill(source, 7)
    return source, target


def test_the_cap_holds_and_freed_memory_returns() -> None:
    backend = HostBackend(2 * PAGE)
    buffer = backend.allocate(PAGE)
    assert buffer.address % PAGE == 0
    with pytest.raises(DeviceMemoryFull) as caught:
        backend.allocate(PAGE + 1)
    assert (caught.value.asked, caught.value.free) == (PAGE + 1, PAGE)
    buffer.free()
    buffer.free()
    assert backend.info().memory_free == 2 * PAGE


def test_a_buffer_that_is_dropped_is_freed() -> None:
    backend = HostBackend(PAGE)
    backend.allocate(PAGE)
    assert backend.info().memory_free == PAGE


def test_pins_can_count_against_the_cap() -> None:
    backend = HostBackend(4 * PAGE, HostFaults(pins_charge_device=True))
    buffer, registration = backend.allocate_pinned(3 * PAGE)
    assert backend.info().memory_free == PAGE
    with pytest.raises(PinRefused):
        backend.allocate_pinned(2 * PAGE)
    registration.unregister()
    buffer.free()
    assert backend.info().memory_free == 4 * PAGE


def test_a_copy_at_once() -> None:
    backend = HostBackend(1 << 20)
    source, target = pair(backend)
    stream = backend.stream()
    stream.copy(target.address, source.address, PAGE)
    assert first(target) == 7
    assert stream.record().query()


def test_a_copy_at_the_last_moment_reads_what_is_there_then() -> None:
    backend = HostBackend(1 << 20, HostFaults(copies="last_moment"))
    source, target = pair(backend)
    stream = backend.stream()
    stream.copy(target.address, source.address, PAGE)
    event = stream.record()
    assert first(target) == 0
    fill(source, 9)
    event.synchronize()
    assert first(target) == 9


def test_a_delayed_copy_runs_on_its_own_thread() -> None:
    backend = HostBackend(1 << 20, HostFaults(copies="threaded", copy_delay_s=2.0))
    source, target = pair(backend)
    stream = backend.stream()
    started = time.monotonic()
    stream.copy(target.address, source.address, PAGE)
    event = stream.record()
    assert time.monotonic() - started < 2.0
    assert not event.query()
    event.synchronize()
    assert first(target) == 7
    backend.close()


@pytest.mark.parametrize("copies", ["threaded", "last_moment"])
def test_a_stream_waits_for_another_streams_event(copies: str) -> None:
    faults = (
        HostFaults(copies="threaded", copy_delay_s=0.02) if copies == "threaded" else HostFaults(copies="last_moment")
    )
    backend = HostBackend(1 << 20, faults)
    source, middle = pair(backend)
    target = backend.allocate(PAGE)
    one, two = backend.stream(), backend.stream()
    one.copy(middle.address, source.address, PAGE)
    two.wait(one.record())
    two.copy(target.address, middle.address, PAGE)
    two.synchronize()
    assert first(target) == 7
    backend.close()


def test_copies_that_fail_after_a_while_are_reported_by_every_later_event() -> None:
    backend = HostBackend(1 << 20, HostFaults(fail_copies_after=1))
    source, target = pair(backend)
    stream = backend.stream()
    stream.copy(target.address, source.address, PAGE)
    stream.record().synchronize()
    stream.copy(target.address, source.address, PAGE)
    with pytest.raises(EngineError, match="copy 1 of 4096 bytes failed"):
        stream.record().synchronize()
    with pytest.raises(EngineError):
        stream.record().query()


def test_an_event_that_completes_late_says_no_first() -> None:
    backend = HostBackend(1 << 20, HostFaults(late_queries=2))
    event = backend.stream().record()
    assert [event.query() for _ in range(4)] == [False, False, True, True]


def test_copies_of_pageable_memory_are_counted() -> None:
    backend = HostBackend(1 << 20)
    _, target = pair(backend)
    pageable = (ctypes.c_uint8 * PAGE)()
    backend.stream().copy(target.address, ctypes.addressof(pageable), PAGE)
    assert backend.statistics().pageable_copies == 1
