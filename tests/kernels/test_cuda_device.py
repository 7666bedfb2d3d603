"""Launches without a card: how arguments are packed, graphs captured, kernels loaded before anything runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cuda import compile as compiling
from strata.kernels.cuda.device import CudaMachine
from strata.kernels.cuda.driver import open_context
from strata.kernels.cuda.program import Address, Launch
from strata.paths import Home
from tests.kernels.fake_cuda import FakeCuda, Kernel


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int32), ("second", ctypes.c_uint64))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.fixture
def machine(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaMachine]:
    (tmp_path / "sums.cu").write_text("sums")
    (tmp_path / "nothing.cu").write_text("nothing")
    monkeypatch.setattr(compiling, "FOLDERS", (tmp_path,))
    machine = CudaMachine(open_context(0), Home(tmp_path / "home"))
    yield machine
    machine.close()
    machine.close()
    assert fake.live["stream"] == fake.live.get("module", 0) == fake.live.get("graph", 0) == 0


def add_kernel(fake: FakeCuda) -> list[tuple[object, ...]]:
    """'sums.add': x[0] += y; what each run was given is in the list."""
    runs: list[tuple[object, ...]] = []

    def add(grid: tuple[int, int, int], block: int, x: int, y: float) -> None:
        runs.append((grid, block, y))
        ctypes.c_float.from_address(x).value += y

    fake.kernels["add"] = Kernel((ctypes.c_uint64, ctypes.c_float), add)
    return runs


def test_each_kind_of_argument(fake: FakeCuda, machine: CudaMachine) -> None:
    seen: list[object] = []
    types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, Pair, ctypes.c_int32)
    fake.kernels["look"] = Kernel(types, lambda grid, block, *values: seen.extend(values))
    x = torch.zeros(3)
    arguments = (x, Address(2**63 + 5), -7, 2**32 - 1, 0.1, Pair(-3, 2**40), True)
    machine.run_eagerly([Launch("sums.look", (1, 1, 1), 32, 0, arguments)])
    assert seen[:4] == [x.data_ptr(), 2**63 + 5, -7, 2**32 - 1]
    assert seen[4] == torch.tensor(0.1).item()
    pair = seen[5]
    assert isinstance(pair, Pair)
    assert (pair.first, pair.second) == (-3, 2**40)
    assert seen[6] == 1


@pytest.mark.parametrize("argument", [2**32, -(2**31) - 1, "text", None])
def test_what_is_no_argument(machine: CudaMachine, argument: object) -> None:
    with pytest.raises(AssertionError, match="argument"):
        machine.run_eagerly([Launch("nothing.nothing", (1, 1, 1), 32, 0, (argument,))])  # type: ignore[arg-type]


def test_a_graph_runs_its_launches_in_order_each_time(fake: FakeCuda, machine: CudaMachine) -> None:
    runs = add_kernel(fake)
    x = torch.zeros(1)
    graph = machine.prepare([Launch("sums.add", (n, 1, 1), 32 * n, 0, (x, float(n))) for n in (1, 2, 3)])
    assert not runs, "capturing runs nothing"
    assert graph.num_launches == 3
    assert graph.handle > 0
    graph.run()
    graph.run()
    machine.synchronize()
    assert x.item() == 12
    assert runs == [((n, 1, 1), 32 * n, float(n)) for n in (1, 2, 3)] * 2
    graph.close()
    graph.close()


def test_everything_is_loaded_before_the_capture_begins(fake: FakeCuda, machine: CudaMachine) -> None:
    add_kernel(fake)
    x = torch.zeros(1)
    machine.prepare([Launch("sums.add", (1, 1, 1), 32, 0, (x, 1.0)), Launch("nothing.nothing", (1, 1, 1), 32, 0, ())])
    begin = fake.calls.index("cuStreamBeginCapture")
    for call in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"):
        assert max(at for at, name in enumerate(fake.calls) if name == call) < begin
    assert sorted(fake.loaded) == ["add", "nothing"]
    assert fake.calls.index("cuGraphUpload") > begin
    fake.calls.clear()
    machine.prepare([Launch("sums.add", (1, 1, 1), 32, 0, (x, 1.0))])
    assert not {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"} & set(fake.calls), "loaded once"


def test_large_shared_memory_is_asked_for_once_at_its_most(fake: FakeCuda, machine: CudaMachine) -> None:
    launches = [Launch("nothing.nothing", (1, 1, 1), 32, shared, ()) for shared in (100, 60_000, 90_000)]
    machine.prepare(launches)
    assert fake.shared == {"nothing": 90_000}
    fake.calls.clear()
    machine.prepare(launches)
    assert "cuFuncSetAttribute" not in fake.calls
    with pytest.raises(EngineError, match=r"nothing\.nothing needs 300,000 bytes of shared memory .* has 232,448"):
        machine.prepare([Launch("nothing.nothing", (1, 1, 1), 32, 300_000, ())])


@pytest.mark.parametrize("kernel", ["sums.gone", "gone.add"])
def test_a_kernel_that_is_not_there_is_named(machine: CudaMachine, kernel: str) -> None:
    with pytest.raises(EngineError, match="gone"):
        machine.prepare([Launch(kernel, (1, 1, 1), 32, 0, ())])


def test_a_launch_that_is_refused_leaves_no_capture_open(fake: FakeCuda, machine: CudaMachine) -> None:
    with pytest.raises(EngineError, match=r"launching nothing\.nothing with \(1, 1, 1\) blocks of 2000 threads"):
        machine.prepare([Launch("nothing.nothing", (1, 1, 1), 2000, 0, ())])
    assert fake.live["graph"] == 0
    runs = add_kernel(fake)
    machine.run_eagerly([Launch("sums.add", (1, 1, 1), 32, 0, (torch.zeros(1), 1.0))])
    assert len(runs) == 1


def test_a_failed_kernel_is_an_error_when_waited_for(fake: FakeCuda, machine: CudaMachine) -> None:
    fake.kernels["bad"] = Kernel((), None)
    graph = machine.prepare([Launch("sums.bad", (1, 1, 1), 32, 0, ())])
    graph.run()
    with pytest.raises(EngineError, match="CUDA_ERROR_ILLEGAL_ADDRESS: words of illegal address"):
        machine.synchronize()


def test_a_graph_keeps_its_tensors(fake: FakeCuda, machine: CudaMachine) -> None:
    add_kernel(fake)
    x = torch.zeros(1)
    address, references = x.data_ptr(), x._use_count()  # type: ignore[attr-defined]
    graph = machine.prepare([Launch("sums.add", (1, 1, 1), 32, 0, (x, 1.0))])
    assert x._use_count() >= references  # type: ignore[attr-defined]
    del x
    graph.run()
    assert ctypes.c_float.from_address(address).value == 1.0


def test_times(fake: FakeCuda, machine: CudaMachine) -> None:
    """The fake's clock goes on by 1 ms at each event, and at each kernel that notes its time."""
    add_kernel(fake)
    x = torch.zeros(1)
    launches = [Launch("sums.add", (1, 1, 1), 32, 0, (x, 1.0)), Launch("nothing.nothing", (2, 1, 1), 64, 0, ())]
    timed = machine.run_timed(launches)
    assert [(one.kernel, one.block, one.microseconds) for one in timed] == [
        ("sums.add", 32, 1000.0),
        ("nothing.nothing", 64, 1000.0),
    ]
    assert machine.run_timed(launches[:1])[0].microseconds == 1000.0, "what was noted before is forgotten"
    graph = machine.prepare(launches)
    assert machine.time_ms(graph.run, 4) == [1.0] * 4
    assert x.item() == 7
    assert machine.empty_graph_ms(100) == 1.0
    graph.close()
    del timed
    assert machine.load_ms > 0
    assert {b"--define-macro=STRATA_STAMPED" in options for _, _, options in fake.compiled} == {True, False}


def test_kernels_that_note_no_time_are_not_timed(fake: FakeCuda, machine: CudaMachine) -> None:
    add_kernel(fake)
    fake.silent.add("add")
    with pytest.raises(EngineError, match=r"sums\.cu noted 0 times for 1 launches"):
        machine.run_timed([Launch("sums.add", (1, 1, 1), 32, 0, (torch.zeros(1), 1.0))])
    fake.forget_stamps()
    with pytest.raises(EngineError, match=r"finding what sums\.cu notes"):
        machine.run_timed([Launch("sums.add", (1, 1, 1), 32, 0, (torch.zeros(1), 1.0))])
    nothing = Launch("nothing.nothing", (1, 1, 1), 32, 0, ())
    assert [one.kernel for one in machine.run_timed([nothing])] == ["nothing.nothing"], "other files do not matter"
