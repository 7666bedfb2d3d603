"""The driver's side on a real card: the cap, aliases, refusals that leave nothing behind, streams, events, graphs.

Runs with the package and pytest alone (also with --noconftest).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strata.engine.devices import named_refusals
from strata.errors import ConfigError, EngineError, MemoryPlanError
from strata.kernels.backend import DeviceMemoryFull, PinRefused
from strata.kernels.cuda import compile as compiling
from strata.kernels.cuda.cuda_device import CudaDevice, check_card, open_device
from strata.kernels.cuda.program import Address, Launch
from strata.paths import Home

pytestmark = pytest.mark.gpu
MIB = 1 << 20
SOURCE = """
#include "step.h"
struct Pair { int first; unsigned long long second; };
extern "C" __global__ void add(float* x, int n, float y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = step(x[i], y);
}
extern "C" __global__ void look(unsigned long long* out, Pair pair, int i, float f, unsigned long long address) {
    out[0] = pair.first; out[1] = pair.second; out[2] = i; out[3] = __float_as_uint(f); out[4] = address;
}
extern "C" __global__ void reverse(int* x) {
    extern __shared__ int kept[];
    for (int i = threadIdx.x; i < 20000; i += blockDim.x) kept[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 20000; i += blockDim.x) x[i] = kept[19999 - i];
}
extern "C" __global__ void wait(volatile int* word) { while (*word == 0) {} }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """For kernels: those above and the package's empty one. What tests before it have left counts for nobody's cap."""
    package = compiling.FOLDERS[0]
    (tmp_path / "tests.cu").write_text(SOURCE)
    (tmp_path / "step.h").write_text("__device__ float step(float x, float y) { return x + y; }\n")
    for name in ("nothing.cu", "device.h"):
        (tmp_path / name).write_bytes((package / name).read_bytes())
    monkeypatch.setattr(compiling, "FOLDERS", (tmp_path,))
    gc.collect()
    torch.cuda.empty_cache()
    return Home(tmp_path / "home")


@pytest.fixture
def device(home: Home) -> Iterator[CudaDevice]:
    """A card of 64 MiB."""
    with open_device(0, cap_bytes=64 * MIB, home=home) as device:
        yield device


def words(buffer: torch.Tensor, dtype: torch.dtype) -> list[float]:
    return list(buffer.view(dtype).tolist())


def host(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def test_the_card_is_as_torch_sees_it(device: CudaDevice) -> None:
    card, seen = device.card, torch.cuda.get_device_properties(0)
    assert card.name == seen.name
    assert card.architecture == seen.major * 10 + seen.minor
    assert card.multiprocessors == device.machine.multiprocessors == seen.multi_processor_count
    assert abs(card.memory_total - seen.total_memory) <= 64 * MIB
    assert card.cuda >= (13, 0)
    print(device.describe(), card)


def test_a_card_that_is_not_there(device: CudaDevice) -> None:
    with pytest.raises(ConfigError, match=f"--device cuda:99: {torch.cuda.device_count()} CUDA device"):
        check_card(99)


def test_the_cap_holds_and_its_peak_is_measured(device: CudaDevice) -> None:
    backend = device.backend
    before, _ = device.context.memory()
    one = backend.allocate(40 * MIB)
    assert one.address % 4096 == 0
    assert before - device.context.memory()[0] >= 40 * MIB
    with pytest.raises(DeviceMemoryFull) as full:
        backend.allocate(30 * MIB)
    assert (full.value.asked, full.value.free) == (30 * MIB, 24 * MIB)
    small = [backend.allocate(n) for n in (1, 5000, 70_000)]
    assert all(buffer.address % 4096 == 0 for buffer in small)
    for buffer in (one, *small):
        buffer.free()
    found = backend.statistics()
    assert found.device_bytes == 0
    assert 40 * MIB < found.peak_bytes <= 64 * MIB
    assert backend.info().memory_free == backend.info().memory_total == 64 * MIB


def test_torch_and_the_backend_share_the_cap(home: Home) -> None:
    held = torch.cuda.memory_reserved(0)  # what libraries of earlier tests keep for good
    with open_device(0, cap_bytes=64 * MIB + held, home=home) as device:
        charge = device.backend.share_with_torch(34 * MIB + held, 40 * MIB + held)
        kept = torch.zeros(30 * MIB, dtype=torch.uint8, device=device.machine.device)
        with pytest.raises(MemoryPlanError, match="no room for a test: only"), named_refusals(device, "a test"):
            torch.zeros(30 * MIB, dtype=torch.uint8, device=device.machine.device)
        with pytest.raises(DeviceMemoryFull):
            device.backend.allocate(31 * MIB)
        assert 30 * MIB <= device.backend.statistics().torch_peak_bytes - held <= 40 * MIB
        del kept
        charge.release()
        torch.zeros(100 * MIB, dtype=torch.uint8, device=device.machine.device)
        device.trim()


def test_lent_memory_is_torchs_and_comes_back_at_its_address(home: Home) -> None:
    held = torch.cuda.memory_reserved(0)
    with open_device(0, cap_bytes=512 * MIB + held, home=home) as device:
        backend, torch_device = device.backend, device.machine.device
        buffer = backend.allocate_lendable(400 * MIB, 64 * MIB)
        charge = backend.share_with_torch(20 * MIB + held, 40 * MIB + held)
        stream, pattern = backend.stream(), torch.arange(MIB, dtype=torch.int32)
        for start in (0, 396 * MIB):
            stream.copy(buffer.address + start, pattern.data_ptr(), 4 * MIB)
        stream.synchronize()
        for _ in range(2):
            assert buffer.lend(100 * MIB) == 128 * MIB
            kept = torch.ones(110 * MIB, dtype=torch.uint8, device=torch_device)
            assert int(kept[-1]) == 1
            del kept
            buffer.take_back()
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(110 * MIB, dtype=torch.uint8, device=torch_device)
            back = torch.zeros_like(pattern)
            stream.copy(back.data_ptr(), buffer.address, 4 * MIB)
            stream.synchronize()
            assert torch.equal(back, pattern)
            stream.copy(buffer.address + 330 * MIB, pattern.data_ptr(), 4 * MIB)  # over a border of two pieces
            stream.copy(back.data_ptr(), buffer.address + 330 * MIB, 4 * MIB)
            stream.synchronize()
            assert torch.equal(back, pattern)
        charge.release()
        buffer.free()
        assert backend.statistics().device_bytes == backend.statistics().charged_bytes == 0
        device.trim()


def test_more_than_the_card_has() -> None:
    with open_device(0) as device:
        free, _ = device.context.memory()
        with pytest.raises(DeviceMemoryFull) as full:
            device.backend.allocate(free + (1 << 40))
        assert 0 < full.value.free <= free + 64 * MIB
        device.backend.allocate(MIB).free()


def test_a_buffer_as_a_tensor(device: CudaDevice) -> None:
    buffer = device.backend.allocate(1000)
    tensor = device.tensor(buffer)
    assert tensor.data_ptr() == buffer.address
    tensor.fill_(7)
    assert tensor.sum().item() == 7000
    del buffer
    gc.collect()
    assert device.backend.statistics().device_bytes == 4096, "the tensor keeps it"
    del tensor
    gc.collect()
    assert device.backend.statistics().device_bytes == 0


def test_the_device_reads_and_writes_page_locked_memory(device: CudaDevice) -> None:
    buffer, registration = device.backend.allocate_pinned(MIB)
    with mmap.mmap(-1, 2 * MIB) as mapped:
        start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        registered = device.backend.register(start + 4096, MIB)
        for address, one in ((buffer.address, registration), (start + 4096, registered)):
            values = host(address + 64, 400).view(torch.float32)
            values.copy_(torch.arange(100.0))
            alias = Address(one.alias(address + 64))
            device.machine.run_eagerly([Launch("tests.add", (1, 1, 1), 128, 0, (alias, 100, 0.5))])
            device.machine.synchronize()
            assert values.tolist() == [n + 0.5 for n in range(100)]
        assert device.backend.statistics().pinned_bytes == 2 * MIB
        registered.unregister()
        registered.unregister()
        del values
    buffer.free()
    assert device.backend.statistics().pinned_bytes == 0


def test_a_refused_registration_leaves_nothing_behind(device: CudaDevice) -> None:
    """Ranges that nobody mapped, that are locked already, and an allocation that no machine has."""
    backend = device.backend
    with mmap.mmap(-1, MIB) as mapped:
        start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        whole = backend.register(start, MIB)
        with pytest.raises(PinRefused, match="CUDA_ERROR_") as refused:
            backend.register(start, MIB)
        print(refused.value)
        for address, nbytes in ((1 << 46, MIB), (start, 1 << 44)):
            with pytest.raises(PinRefused, match="CUDA_ERROR_") as refused:
                backend.register(address, nbytes)
            print(refused.value)
        with pytest.raises(PinRefused, match="CUDA_ERROR_") as refused:
            backend.allocate_pinned(1 << 46)
        print(refused.value)
        # Nothing is sticky: not for the driver, not for torch's runtime, not for later registrations.
        device.context.synchronize()
        assert torch.ones(4, device=device.machine.device).sum().item() == 4
        torch.cuda.synchronize()
        whole.unregister()
        again = backend.register(start, MIB)
        again.unregister()
    backend.allocate(MIB).free()
    buffer, _ = backend.allocate_pinned(MIB)
    buffer.free()
    assert backend.statistics().num_refusals == 4


def test_slices_that_share_no_page_lock_one_by_one(device: CudaDevice) -> None:
    with mmap.mmap(-1, 16 * MIB) as mapped:
        start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        size = 675 * 4096  # one expert
        slices = [device.backend.register(start + at * size, size) for at in range(5)]
        target = device.backend.allocate(5 * size)
        content = host(start, 5 * size)
        content.view(torch.int32).copy_(torch.arange(5 * size // 4))
        stream = device.backend.stream()
        stream.copy(target.address, start, 5 * size)  # one copy over five registrations
        stream.synchronize()
        assert torch.equal(device.tensor(target).cpu(), content)
        for one in slices:
            one.unregister()
        del content
    target.free()


def test_streams_wait_for_events_and_nothing_else(device: CudaDevice) -> None:
    """A kernel spins until a word in RAM is set; another stream goes on meanwhile."""
    flag, registration = device.backend.allocate_pinned(4096)
    word = ctypes.c_int32.from_address(flag.address)
    word.value = 0
    buffer, staging = device.backend.allocate(MIB), device.backend.allocate_pinned(MIB)[0]
    free, waiting = device.backend.stream(), device.backend.stream()
    device.machine.run_eagerly([Launch("tests.wait", (1, 1, 1), 1, 0, (Address(registration.alias(flag.address)),))])
    blocked = _event_after(device)
    timer = threading.Timer(20, lambda: setattr(word, "value", 1))  # a failure must not hang the card
    timer.start()
    try:
        waiting.wait(blocked)
        waiting.copy(staging.address, buffer.address, MIB)
        late = waiting.record()
        free.copy(buffer.address, staging.address, MIB)
        free.record().synchronize()
        assert not blocked.query()
        assert not late.query()
    finally:
        word.value = 1
        timer.cancel()
    late.synchronize()
    assert blocked.query()
    assert late.query()
    for one in (buffer, staging, flag):
        one.free()


def _event_after(device: CudaDevice):  # type: ignore[no-untyped-def]
    """An event of the backend behind the machine's stream."""
    event = device.backend.event()
    status = device.context.driver.cuEventRecord(event.handle, device.machine.stream)[0]
    assert int(status) == 0
    return event


def test_copies_in_a_batch(device: CudaDevice) -> None:
    source, _ = device.backend.allocate_pinned(MIB)
    host(source.address, MIB).view(torch.int32).copy_(torch.arange(MIB // 4).flip(0))
    target = device.backend.allocate(MIB)
    stream, piece = device.backend.stream(), MIB // 64
    stream.copy_batch([(target.address + at, source.address + at, piece) for at in range(0, MIB, piece)])
    stream.synchronize()
    assert torch.equal(device.tensor(target).cpu(), host(source.address, MIB))
    target.free()
    source.free()


def test_arguments_arrive(device: CudaDevice) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_int32), ("second", ctypes.c_uint64))

    out = torch.zeros(5, dtype=torch.int64, device=device.machine.device)
    torch.cuda.synchronize()
    arguments = (out, Pair(3, 2**40), -1, 0.1, Address(2**60))
    device.machine.run_eagerly([Launch("tests.look", (1, 1, 1), 1, 0, arguments)])
    device.machine.synchronize()
    assert out.tolist() == [3, 2**40, -1, torch.tensor(0.1).view(torch.int32).item(), 2**60]


def test_a_graph_of_launches(device: CudaDevice) -> None:
    x = torch.arange(20_000, dtype=torch.int32, device=device.machine.device)
    y = torch.zeros(300, device=device.machine.device)
    torch.cuda.synchronize()
    launches = [Launch("tests.add", (3, 1, 1), 128, 0, (y, 300, 1.0)) for _ in range(50)]
    launches.insert(25, Launch("tests.reverse", (1, 1, 1), 1024, 80_000, (x,)))
    graph = device.machine.prepare(launches)
    assert y.sum().item() == 0
    for _ in range(3):
        graph.run()
    device.machine.synchronize()
    assert y.tolist() == [150.0] * 300
    assert x.tolist() == list(range(20_000))[::-1]
    times = device.machine.time_ms(graph.run, 20)
    assert len(times) == 20
    assert all(0 < time < 1000 for time in times)
    with pytest.raises(EngineError, match=r"finding what tests\.cu notes"):  # these kernels note no time
        device.machine.run_timed(launches)
    nothings = [Launch("nothing.nothing", (1, 1, 1), 32, 0, ())] * 40
    timed = [one.microseconds for one in device.machine.run_timed(nothings)]
    assert len(timed) == 40
    assert all(0 <= one < 1000 for one in timed)
    print(f"graph of 51: {sorted(times)[10] * 1000:.1f} us; empty graph of 500: ", end="")
    print(f"{device.machine.empty_graph_ms(500) * 1000:.1f} us; loading {device.machine.load_ms:.1f} ms")
    graph.close()


def test_compiled_once(device: CudaDevice, tmp_path: Path) -> None:
    first = compiling.compile_kernels(["tests"], device.card.architecture, device.card.cuda, Home(tmp_path / "other"))
    again = compiling.compile_kernels(["tests"], device.card.architecture, device.card.cuda, Home(tmp_path / "other"))
    assert (first["tests"].origin, again["tests"].origin) == ("compiled", "kept")
    assert first["tests"].image == again["tests"].image


def test_refused_launches_are_errors_and_the_next_graph_runs(device: CudaDevice) -> None:
    with pytest.raises(EngineError, match=r"launching nothing\.nothing .* CUDA_ERROR_INVALID_VALUE"):
        device.machine.prepare([Launch("nothing.nothing", (1, 1, 1), 4096, 0, ())])
    with pytest.raises(EngineError, match="shared memory"):
        device.machine.prepare([Launch("nothing.nothing", (1, 1, 1), 32, 1 << 20, ())])
    with pytest.raises(EngineError, match=r"finding nothing\.gone"):
        device.machine.prepare([Launch("nothing.gone", (1, 1, 1), 32, 0, ())])
    device.machine.prepare([Launch("nothing.nothing", (1, 1, 1), 32, 0, ())]).run()
    device.machine.synchronize()
