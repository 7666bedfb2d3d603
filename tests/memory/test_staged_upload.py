"""Copies through page-locked buffers from several threads, whatever the device's timing."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from strata.errors import EngineError
from strata.kernels.host import CopyTiming, HostBackend, HostFaults
from strata.memory import staged_upload
from strata.memory.staged_upload import StagedUpload
from tests.patience import PATIENCE_S

BUFFER_BYTES = 4096
LIMIT_S = PATIENCE_S


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


def test_closing_waits_for_who_writes_to_a_buffer_and_refuses_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may outlive an interrupted load, and the buffers are freed next."""
    backend = HostBackend(1 << 20)
    stream, (buffer, _) = backend.stream(), backend.allocate_pinned(BUFFER_BYTES)
    upload = StagedUpload(stream, [buffer.address], BUFFER_BYTES)
    writing, go_on = threading.Event(), threading.Event()
    move = ctypes.memmove

    def late(target: int, source: int, nbytes: int) -> object:
        writing.set()
        assert go_on.wait(LIMIT_S)
        return move(target, source, nbytes)

    monkeypatch.setattr(staged_upload.ctypes, "memmove", late)
    source, target = np.ones(3 * BUFFER_BYTES, np.uint8), np.zeros(3 * BUFFER_BYTES, np.uint8)
    with ThreadPoolExecutor(2) as pool:
        copying = pool.submit(upload.copy, target.ctypes.data, source.ctypes.data, source.nbytes)
        assert writing.wait(LIMIT_S)
        closing = pool.submit(upload.close)
        time.sleep(0.05)
        assert not closing.done(), "a thread is on its way to the buffer"
        go_on.set()
        closing.result(LIMIT_S)
        with pytest.raises(EngineError, match="the load has ended"):
            copying.result(LIMIT_S)
    with pytest.raises(EngineError, match="the load has ended"):
        upload.copy(target.ctypes.data, source.ctypes.data, 1)
    upload.close()
    buffer.free()
    backend.close()


def test_an_interruption_of_closing_comes_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HostBackend(1 << 20)
    buffer, _ = backend.allocate_pinned(BUFFER_BYTES)
    upload = StagedUpload(backend.stream(), [buffer.address], BUFFER_BYTES)
    held, looks = upload._buffers.get(), 0  # a thread is on its way with it

    def pressed(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            upload._buffers.put(held)
        raise KeyboardInterrupt

    monkeypatch.setattr(staged_upload.time, "sleep", pressed)
    with pytest.raises(KeyboardInterrupt):
        upload.close()
    assert looks == 3, "each press is remembered, none ends the wait"
    buffer.free()
    backend.close()
