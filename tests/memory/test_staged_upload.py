"""Copies through page-locked buffers from several threads, whatever the device's timing, and who waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from strata.kernels.host import CopyTiming, HostBackend, HostFaults
from strata.memory.staged_upload import StagedUpload

BUFFER_BYTES = 4096
LIMIT_S = 30.0


@pytest.fixture(params=["at_once", "threaded", "last_moment"])
def backend(request: pytest.FixtureRequest) -> Iterator[HostBackend]:
    timing: CopyTiming = request.param
    made = HostBackend(1 << 20, HostFaults(copies=timing, copy_delay_s=0.001))
    yield made
    made.close()


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_what_was_copied_arrives_though_its_source_is_used_again(backend: HostBackend, num_buffers: int) -> None:
    stream = backend.stream()
    held = [backend.allocate_pinned(BUFFER_BYTES)[0] for _ in range(num_buffers)]
    upload = StagedUpload(stream, [buffer.address for buffer in held], BUFFER_BYTES)
    sizes = [1, 100, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES, 10_000]
    targets = [np.zeros(size, np.uint8) for size in sizes]

    def copy(number: int) -> None:
        source = np.full(sizes[number], number + 1, np.uint8)
        upload.copy(targets[number].ctypes.data, source.ctypes.data, sizes[number])
        source[:] = 255

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy, range(len(sizes))))
    stream.synchronize()
    for number, target in enumerate(targets):
        assert np.all(target == number + 1), sizes[number]
    for buffer in held:
        buffer.free()


def test_way_is_given_to_copies_under_way_and_not_for_ever() -> None:
    backend = HostBackend(1 << 20)
    buffer, _ = backend.allocate_pinned(BUFFER_BYTES)
    stream = backend.stream()
    inside, go_on = threading.Event(), threading.Event()
    copy = stream.copy

    def late(*given: int) -> None:
        inside.set()
        assert go_on.wait(LIMIT_S)
        copy(*given)

    stream.copy = late  # type: ignore[method-assign]
    upload = StagedUpload(stream, [buffer.address], BUFFER_BYTES)
    began = time.perf_counter()
    upload.give_way(LIMIT_S)
    assert time.perf_counter() - began < LIMIT_S / 2, "nobody copies"
    source, target = np.ones(10, np.uint8), np.zeros(10, np.uint8)
    thread = threading.Thread(target=upload.copy, args=(target.ctypes.data, source.ctypes.data, 10))
    thread.start()
    assert inside.wait(LIMIT_S)
    upload.give_way(0.01)  # returns though the copy goes on
    threading.Timer(0.02, go_on.set).start()
    upload.give_way(LIMIT_S)
    thread.join()
    assert time.perf_counter() - began < LIMIT_S
    assert target.tolist() == source.tolist()
    buffer.free()
    backend.close()
