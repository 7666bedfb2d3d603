"""Copies through page-locked buffers from several threads, whatever the device's timing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from strata.kernels.host import CopyTiming, HostBackend, HostFaults
from strata.memory.staged_upload import StagedUpload

BUFFER_BYTES = 4096


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
