"""The three page-locking paths on a device that refuses on purpose, and where slices are cut."""

from __future__ import annotations

import ctypes
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.backend import DeviceInfo, PinRefused
from strata.kernels.host import HostBackend, HostFaults
from strata.memory import page_lock
from strata.memory.page_lock import cut_slices, take_memory
from strata.memory.requests import PinRequest

PAGE = 4096
CAP = 64 << 20


def test_path_1_pins_the_whole_copy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = HostBackend(CAP)
    memory = take_memory(backend, 16, PAGE, PinRequest())
    assert memory.path == 1
    assert memory.aliases.tolist() == [memory.address + place * PAGE for place in range(16)]
    assert re.search(r"page-locking path 1: 0\.06 of 0\.06 MiB pinned", caplog.text)
    assert backend.statistics().pinned_bytes == 16 * PAGE
    memory.close()
    assert backend.statistics().pinned_bytes == 0


def test_path_2_names_slices_and_experts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = HostBackend(CAP, HostFaults(refuse_one_allocation=True))
    memory = take_memory(backend, 10, PAGE, PinRequest(), slice_bytes=4 * PAGE)
    assert memory.path == 2
    assert "3 of 3 slices, 10 of 10 experts" in memory.report
    assert caplog.text.count("page-locking path 2") == 1
    memory.close()


def test_slices_can_be_preferred_to_the_one_allocation_and_the_log_says_so() -> None:
    backend = HostBackend(CAP)
    memory = take_memory(backend, 10, PAGE, PinRequest(prefer_slices=True), slice_bytes=4 * PAGE)
    assert memory.path == 2
    assert "10 of 10 experts, path 1 not tried (STRATA_PREFER_SLICES)" in memory.report
    assert backend.statistics().num_refusals == 0
    memory.close()


class FakeCard(HostBackend):
    """RAM that says it is a card."""

    charges = False

    def info(self) -> DeviceInfo:
        return replace(super().info(), kind="cuda", pins_charge_device=self.charges)


@pytest.fixture
def _ten_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "LEAST_COPY", 10 * PAGE)
    monkeypatch.setattr(page_lock, "PROBE_BYTES", PAGE)


@pytest.mark.usefixtures("_ten_are_many")
@pytest.mark.parametrize(
    ("places", "prefer", "charges", "huge", "path"),
    [
        (10, None, False, True, 2),
        (9, None, False, True, 1),  # too small to matter
        (10, False, False, True, 1),  # the user has said
        (9, True, False, True, 2),
        (10, None, True, True, 1),  # a driver that charges page-locked bytes
        (10, None, False, False, 1),  # a system without huge pages
    ],
)
def test_a_large_copy_on_a_card_takes_the_faster_way(
    places: int, prefer: bool | None, charges: bool, huge: bool, path: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_lock.system, "HAS_HUGE_PAGES", huge)
    backend = FakeCard(CAP)
    backend.charges = charges
    memory = take_memory(backend, places, PAGE, PinRequest(prefer_slices=prefer), slice_bytes=4 * PAGE)
    assert memory.path == path
    assert ("path 1 not tried (slices are faster)" in memory.report) == (path == 2 and prefer is None)
    assert backend.statistics().pinned_bytes == places * PAGE
    memory.close()
    assert backend.statistics().pinned_bytes == 0
    backend.close()


def test_without_a_card_the_documented_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "LEAST_COPY", 10 * PAGE)
    memory = take_memory(HostBackend(CAP), 10, PAGE, PinRequest(prefer_slices=None), slice_bytes=4 * PAGE)
    assert memory.path == 1
    memory.close()


@pytest.mark.usefixtures("_ten_are_many")
@pytest.mark.parametrize("refuse_one", [False, True])
def test_a_driver_that_registers_nothing_is_asked_once(refuse_one: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Path 1 is tried as before; without it nothing is page-locked, since a second registration has broken devices."""
    caplog.set_level(logging.INFO)
    backend = FakeCard(CAP, HostFaults(refuse_at_slice=0, poison_after_refusal=True, refuse_one_allocation=refuse_one))
    memory = take_memory(backend, 10, PAGE, PinRequest(prefer_slices=None), slice_bytes=4 * PAGE)
    assert memory.path == (3 if refuse_one else 1)
    assert caplog.text.count("page-locking path 2 refused: ") == 1
    backend.allocate(PAGE).free()
    memory.close()
    backend.close()


@pytest.mark.usefixtures("_ten_are_many")
def test_a_copy_of_which_nothing_is_locked_says_that_path_1_was_not_tried() -> None:
    """A driver that registers a page and refuses a slice."""
    backend = FakeCard(CAP, HostFaults(refuse_after_bytes=2 * PAGE))
    memory = take_memory(backend, 10, PAGE, PinRequest(prefer_slices=None), slice_bytes=4 * PAGE)
    assert memory.path == 3
    assert "path 1 not tried (slices are faster)" in memory.report
    memory.close()
    backend.close()


@pytest.mark.parametrize("poison", [False, True])
def test_registration_stops_at_the_first_refusal_and_the_device_lives_on(poison: bool) -> None:
    faults = HostFaults(refuse_one_allocation=True, refuse_at_slice=2, poison_after_refusal=poison)
    backend = HostBackend(CAP, faults)
    memory = take_memory(backend, 16, PAGE, PinRequest(), slice_bytes=4 * PAGE)
    assert memory.path == 2
    assert np.flatnonzero(memory.aliases).tolist() == list(range(8))
    assert backend.statistics().num_registrations == 3
    assert backend.statistics().num_refusals == 2
    backend.allocate(PAGE).free()  # later allocations are unharmed
    memory.close()


def test_a_poisoned_device_is_broken_by_one_more_try() -> None:
    backend = HostBackend(CAP, HostFaults(refuse_at_slice=0, poison_after_refusal=True))
    buffer = backend.allocate(2 * PAGE)
    with pytest.raises(PinRefused):
        backend.register(buffer.address, PAGE)
    with pytest.raises(EngineError):
        backend.register(buffer.address, PAGE)
    with pytest.raises(EngineError):
        backend.allocate(PAGE)


def test_path_3_when_no_slice_is_granted() -> None:
    backend = HostBackend(CAP, HostFaults(refuse_one_allocation=True, refuse_after_bytes=0))
    memory = take_memory(backend, 16, PAGE, PinRequest(), slice_bytes=4 * PAGE)
    assert memory.path == 3
    assert not memory.aliases.any()
    assert "0.00 of 0.06 MiB pinned, ordinary memory, " in memory.report
    memory.close()


def test_a_limit_in_bytes_pins_a_prefix_of_whole_experts() -> None:
    backend = HostBackend(CAP)
    memory = take_memory(backend, 16, PAGE, PinRequest("limit", 6 * PAGE), limit=6 * PAGE, slice_bytes=4 * PAGE)
    assert memory.path == 2
    assert np.flatnonzero(memory.aliases).tolist() == list(range(6))
    assert memory.pinned_bytes == 6 * PAGE
    memory.close()


def test_nothing_is_pinned_when_nothing_is_asked_for() -> None:
    backend = HostBackend(CAP)
    memory = take_memory(backend, 4, PAGE, PinRequest("none"), limit=0)
    assert memory.path == 3
    assert backend.statistics().num_registrations == 0
    memory.close()


def test_only_the_ranges_that_are_needed_are_pinned() -> None:
    backend = HostBackend(CAP)
    needed = np.array([False, True, True, False, False, True, False, False])
    memory = take_memory(backend, 8, PAGE, PinRequest(by_need=True), needed=needed)
    assert (memory.aliases != 0).tolist() == needed.tolist()
    memory.close()


def test_slices_that_are_not_page_aligned_still_work() -> None:
    """Fault 5: experts of odd size; the memory is whole, writable, and aliases cover only whole experts."""
    backend = HostBackend(CAP, HostFaults(refuse_one_allocation=True))
    stride = 1088
    memory = take_memory(backend, 50, stride, PinRequest(), slice_bytes=3 * stride)
    pinned = np.flatnonzero(memory.aliases)
    assert 0 < len(pinned) < 50
    for part in memory.slices:
        assert part.offset % PAGE == part.nbytes % PAGE == 0
    for place in pinned.tolist():
        begin, end = place * stride, (place + 1) * stride
        assert any(part.offset <= begin and end <= part.offset + part.nbytes for part in memory.slices)
    ctypes.memset(memory.address, 7, memory.nbytes)
    memory.close()


def test_slices_smaller_than_an_expert_leave_every_expert_pageable() -> None:
    backend = HostBackend(CAP, HostFaults(refuse_one_allocation=True, refuse_after_bytes=PAGE))
    memory = take_memory(backend, 4, 8 * PAGE, PinRequest(), slice_bytes=PAGE)
    assert memory.path == 3
    memory.close()


def test_touching_in_parallel_leaves_zeros() -> None:
    backend = HostBackend(CAP, HostFaults(refuse_one_allocation=True))
    memory = take_memory(backend, 2048, PAGE, PinRequest(touch_threads=3), slice_bytes=1 << 20)
    assert not np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address)).any()
    assert memory.path == 2
    memory.close()


@given(
    num_places=st.integers(1, 60),
    stride=st.integers(1, 40).map(lambda n: n * 512),
    slice_bytes=st.integers(1, 100_000),
    flags=st.none() | st.lists(st.booleans(), min_size=60, max_size=60),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_slices_are_whole_pages_and_never_share_one(
    num_places: int, stride: int, slice_bytes: int, flags: list[bool] | None
) -> None:
    needed = None if flags is None else np.array(flags[:num_places])
    cuts = cut_slices(num_places, stride, slice_bytes, PAGE, needed)
    region_bytes = -(-num_places * stride // PAGE) * PAGE
    end = 0
    for offset, nbytes in cuts:
        assert offset % PAGE == nbytes % PAGE == 0
        assert offset >= end
        assert nbytes > 0
        end = offset + nbytes
    assert end <= region_bytes
    if needed is None:
        assert sum(nbytes for _, nbytes in cuts) == region_bytes
