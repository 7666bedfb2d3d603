"""The card's memory without a card: cap, refusals in CUDA's words, aliases, streams and events, everything freed."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator

import pytest
import torch

from strata.errors import EngineError, MemoryPlanError
from strata.kernels.backend import Backend, DeviceMemoryFull, PinRefused
from strata.kernels.cuda.backend import CudaBackend
from strata.kernels.cuda.driver import open_context
from tests.kernels.fake_cuda import CUresult, FakeCuda

MIB = 1 << 20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.fixture
def backend(fake: FakeCuda) -> Iterator[CudaBackend]:
    backend = CudaBackend(open_context(0), 10 * MIB)
    yield backend
    backend.close()
    backend.close()
    gc.collect()
    assert not fake.device_memory
    assert not fake.pinned
    assert fake.live.get("stream", 0) == fake.live.get("event", 0) == 0


@pytest.fixture
def pages() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, MIB) as mapped:
        yield mapped


def address_of(buffer: bytearray | mmap.mmap) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def test_it_is_a_backend(backend: CudaBackend) -> None:
    checked: Backend = backend
    info = checked.info()
    assert (info.name, info.kind, info.memory_total, info.memory_free) == ("Fake 9000", "cuda", 10 * MIB, 10 * MIB)
    assert not info.pins_charge_device


def test_without_a_cap_the_card_is_what_there_is(fake: FakeCuda) -> None:
    backend = CudaBackend(open_context(0))
    assert (backend.info().memory_total, backend.info().memory_free) == (1024 * MIB, 900 * MIB)
    with pytest.raises(DeviceMemoryFull) as full:
        backend.allocate(1000 * MIB)
    assert (full.value.asked, full.value.free) == (1000 * MIB, 900 * MIB)
    assert backend.statistics().device_bytes == 0
    fake.cards[0].integrated = 1
    assert CudaBackend(open_context(0)).info().pins_charge_device


def test_the_cap_counts_allocations_and_charges_together(backend: CudaBackend) -> None:
    one = backend.allocate(4 * MIB)
    charge = backend.charge(5 * MIB)
    assert backend.info().memory_free == MIB
    with pytest.raises(DeviceMemoryFull) as full:
        backend.allocate(MIB + 1)
    assert (full.value.asked, full.value.free) == (MIB + 1, MIB)
    with pytest.raises(DeviceMemoryFull):
        backend.charge(2 * MIB)
    two = backend.allocate(MIB)
    one.free()
    one.free()
    charge.release()
    charge.release()
    found = backend.statistics()
    assert (found.device_bytes, found.charged_bytes, found.peak_bytes, found.cap_bytes) == (MIB, 0, 10 * MIB, 10 * MIB)
    two.free()


def test_another_program_took_the_memory(fake: FakeCuda, backend: CudaBackend) -> None:
    fake.cards[0].memory_free = 3 * MIB
    assert backend.info().memory_free == 3 * MIB
    with pytest.raises(DeviceMemoryFull) as full:
        backend.allocate(4 * MIB)
    assert (full.value.asked, full.value.free) == (4 * MIB, 3 * MIB)


def test_a_buffer_is_aligned_whatever_the_driver_gives(fake: FakeCuda, backend: CudaBackend) -> None:
    fake.unaligned = True
    buffer = backend.allocate(100)
    assert buffer.address % 4096 == 0
    assert buffer.nbytes == 100
    (start, (_, nbytes)), = fake.device_memory.items()  # fmt: skip
    assert start <= buffer.address
    assert buffer.address + 100 <= start + nbytes
    del buffer
    gc.collect()
    assert not fake.device_memory, "a collected buffer is freed"


def test_the_end_of_a_buffer_is_lent_and_comes_back_at_its_address(backend: CudaBackend, fake: FakeCuda) -> None:
    free = fake.cards[0].memory_free
    buffer = backend.allocate_lendable(MIB + 5000, 64 << 10)
    whole = fake.cards[0].memory_free
    assert 0 < free - MIB - 5000 - whole < 4096, "whole pages"
    ctypes.memset(buffer.address, 7, MIB + 5000)
    for asked, pieces in ((1, 1), (64 << 10, 1), ((64 << 10) + 1, 2), (4 * MIB, 17)):
        lent = buffer.lend(asked)
        taken = pieces * (64 << 10) if pieces < 17 else MIB + 8192
        assert lent == taken - (MIB + 8192 - (MIB + 5000)), "less what is behind the buffer's own end"
        assert fake.cards[0].memory_free == whole + taken
        assert backend.statistics().charged_bytes == taken
        kept = MIB + 5000 - lent
        assert ctypes.string_at(buffer.address, kept) == b"\7" * kept
        buffer.take_back()
        assert fake.cards[0].memory_free == whole
        assert backend.statistics().charged_bytes == 0
        ctypes.memset(buffer.address, 7, MIB + 5000)
    buffer.lend(1)
    buffer.free()
    assert fake.cards[0].memory_free == free
    assert fake.live["range"] == fake.live["mapped memory"] == 0
    assert backend.statistics().device_bytes == backend.statistics().charged_bytes == 0


def test_lent_memory_that_another_program_took_stays_lent(backend: CudaBackend, fake: FakeCuda) -> None:
    buffer = backend.allocate_lendable(MIB, 64 << 10)
    lent = buffer.lend(100 << 10)
    free, fake.cards[0].memory_free = fake.cards[0].memory_free, 64 << 10  # one of the two pieces
    with pytest.raises(DeviceMemoryFull) as full:
        buffer.take_back()
    assert full.value.asked == lent == 128 << 10
    assert fake.cards[0].memory_free == 64 << 10, "what was taken is given back"
    fake.cards[0].memory_free = free
    buffer.take_back()
    assert backend.statistics().device_bytes == MIB
    buffer.free()


def test_a_driver_that_maps_no_memory_is_told_the_option(backend: CudaBackend, fake: FakeCuda) -> None:
    fake.maps_memory = False
    with pytest.raises(MemoryPlanError) as refused:
        backend.allocate_lendable(MIB, 64 << 10)
    assert refused.value.hint == "use --no-prefill-borrow"
    assert fake.live["range"] == backend.statistics().device_bytes == 0
    with pytest.raises(DeviceMemoryFull):
        backend.allocate_lendable(11 * MIB, 64 << 10)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes(backend: CudaBackend, nbytes: int) -> None:
    with pytest.raises(DeviceMemoryFull):
        backend.allocate(nbytes)


def test_torch_gets_its_share_and_no_more(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[tuple[float, int]] = []
    reserved = [3 * MIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7 * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *words: fractions.append(words))
    with pytest.raises(MemoryPlanError, match="torch holds 3 MiB of VRAM, the plan gives it 2 MiB"):
        backend.share_with_torch(MIB, 2 * MIB)
    charge = backend.share_with_torch(6 * MIB, 8 * MIB)
    assert fractions == [(8 / 1024, 0)]
    assert backend.info().memory_free == 4 * MIB
    reserved[0] = 7 * MIB
    assert backend.info().memory_free == 3 * MIB, "what torch rounds up is not free"
    assert backend.statistics().torch_peak_bytes == 7 * MIB
    with pytest.raises(DeviceMemoryFull):
        backend.share_with_torch(5 * MIB, 8 * MIB)
    charge.release()
    charge.release()
    assert fractions[-1] == (1.0, 0)
    assert backend.statistics().charged_bytes == backend.statistics().torch_peak_bytes == 0


def test_a_page_locked_allocation_and_its_alias(fake: FakeCuda, backend: CudaBackend) -> None:
    buffer, registration = backend.allocate_pinned(MIB)
    assert registration.alias(buffer.address + 77) == buffer.address + 77
    assert backend.statistics().pinned_bytes == MIB
    with pytest.raises(AssertionError, match="outside"):
        registration.alias(buffer.address + MIB)
    registration.unregister()
    buffer.free()
    staging, plain = backend.allocate_pinned(MIB, mapped=False)
    with pytest.raises(AssertionError, match="does not address"):
        plain.alias(staging.address)
    staging.free()
    assert backend.statistics().pinned_bytes == 0


def test_refusals_are_answers_in_cudas_words(fake: FakeCuda, backend: CudaBackend, pages: mmap.mmap) -> None:
    fake.refuse_pins_after = MIB // 2
    with pytest.raises(PinRefused, match=r"CUDA_ERROR_OUT_OF_MEMORY: words of out of memory") as refused:
        backend.allocate_pinned(MIB)
    assert refused.value.asked == MIB
    start = address_of(pages)
    first = backend.register(start, MIB // 2)
    with pytest.raises(PinRefused):
        backend.register(start + MIB // 2, MIB // 2)
    with pytest.raises(PinRefused, match="HOST_MEMORY_ALREADY_REGISTERED"):
        backend.register(start, MIB // 2)
    backend.allocate(MIB).free()  # the device works on
    first.unregister()
    first.unregister()
    found = backend.statistics()
    assert (found.num_registrations, found.num_refusals, found.pinned_bytes) == (3, 3, 0)


def test_memory_without_an_alias_is_given_back(fake: FakeCuda, backend: CudaBackend, pages: mmap.mmap) -> None:
    fake.no_alias = True
    with pytest.raises(PinRefused, match="INVALID_VALUE"):
        backend.allocate_pinned(MIB)
    with pytest.raises(PinRefused, match="INVALID_VALUE"):
        backend.register(address_of(pages), MIB)
    assert not fake.pinned
    buffer, _ = backend.allocate_pinned(MIB, mapped=False)
    buffer.free()


def test_a_broken_device_is_no_refusal(fake: FakeCuda, backend: CudaBackend, pages: mmap.mmap) -> None:
    fake.refuse_pins_after, fake.refuse_status = 0, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(EngineError, match="page-locking 1048576 bytes failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        backend.register(address_of(pages), MIB)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (512, 4096), (0, 100)])
def test_registration_takes_whole_pages(backend: CudaBackend, pages: mmap.mmap, offset: int, nbytes: int) -> None:
    with pytest.raises(AssertionError):
        backend.register(address_of(pages) + offset, nbytes)


def test_copies_and_events(fake: FakeCuda, backend: CudaBackend) -> None:
    source, target = bytearray(range(200)), bytearray(200)
    stream, other = backend.stream(), backend.stream()
    stream.copy(address_of(target), address_of(source), 100)
    fake.busy_queries = 2
    event = stream.record()
    assert [event.query() for _ in range(3)] == [False, False, True]
    event.synchronize()
    other.wait(event)
    other.copy_batch([(address_of(target) + at, address_of(source) + at, 10) for at in range(100, 150, 10)])
    other.copy_batch([(address_of(target) + 150, address_of(source) + 150, 50)])
    other.copy_batch([])
    other.synchronize()
    assert target == source
    found = backend.statistics()
    assert (found.num_copies, found.copied_bytes) == (7, 200)
    assert fake.calls.count("cuMemcpyBatchAsync") == 1
    assert stream.handle != other.handle


def test_events_are_used_again(fake: FakeCuda, backend: CudaBackend) -> None:
    stream = backend.stream()
    for _ in range(50):
        stream.record().synchronize()
    assert fake.calls.count("cuEventCreate") == 1


def test_an_event_that_outlives_the_backend(fake: FakeCuda) -> None:
    backend = CudaBackend(open_context(0))
    event = backend.stream().record()
    backend.close()
    del event
    gc.collect()
    assert fake.live["event"] == 0


def test_failed_work_is_an_error_for_who_waits(fake: FakeCuda, backend: CudaBackend) -> None:
    stream = backend.stream()
    fake._streams[stream.handle].error = CUresult.CUDA_ERROR_LAUNCH_FAILED
    event = stream.record()
    for wait in (event.query, event.synchronize, stream.synchronize):
        with pytest.raises(EngineError, match="CUDA_ERROR_LAUNCH_FAILED: words of launch failed"):
            wait()


@pytest.mark.parametrize("copy", [(0, 8, 4), (8, 0, 4), (8, 8, 0)])
def test_no_copy_of_nothing(backend: CudaBackend, copy: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        backend.stream().copy(*copy)
