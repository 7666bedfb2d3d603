"""Kernels are compiled once for what decides them, kept whole, and made again where the kept file is damaged."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata.errors import ConfigError, EngineError
from strata.kernels.cuda import compile as compiling
from strata.kernels.cuda.compile import (
    InWorker,
    KernelSource,
    compile_kernels,
    compile_source,
    count_kept,
    list_kernels,
    list_units,
)
from strata.paths import Home
from tests.kernels.fake_cuda import FakeCuda

DRIVER = (13, 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders of sources in place of the package's: a.cu -> one.h -> two.h of the second folder; b.cu alone."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "a.cu").write_text('// #include "none.h"\n#include "one.h"\n  # include "two.h"\nkernel a\n')
    (first / "b.cu").write_text("kernel b\n")
    (first / "one.h").write_text('#include "two.h"\n#include <cstdint>\n')
    (second / "two.h").write_text("two\n")
    monkeypatch.setattr(compiling, "FOLDERS", (first, second))
    return first


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def origins(home: Home, architecture: int = 90, driver: tuple[int, int] = DRIVER) -> dict[str, str]:
    return {name: one.origin for name, one in compile_kernels(["a", "b"], architecture, driver, home).items()}


def test_headers_are_found_by_their_include_lines(sources: Path) -> None:
    source = KernelSource.read("a")
    assert list(source.headers) == ["one.h", "two.h"]
    assert source.headers["two.h"] == b"two\n"
    (sources / "one.h").write_text('#include "gone.h"')
    with pytest.raises(EngineError, match=r"a\.cu includes gone\.h"):
        KernelSource.read("a")
    with pytest.raises(EngineError, match=r"c\.cu cannot be read"):
        KernelSource.read("c")


def test_compiled_once_then_kept(fake: FakeCuda, sources: Path, home: Home) -> None:
    first = compile_kernels(["a", "b"], 90, DRIVER, home)
    assert {one.origin for one in first.values()} == {"compiled"}
    assert first["b"].image == b"machine code of kernel b\n"
    assert {(names, options) for _, names, options in fake.compiled} == {
        ((b"one.h", b"two.h"), (b"--gpu-architecture=sm_90", b"--std=c++17", b"--fmad=false")),
        ((), (b"--gpu-architecture=sm_90", b"--std=c++17", b"--fmad=false")),
    }
    assert count_kept(90, DRIVER, home) == (2, 2)
    assert count_kept(89, DRIVER, home) == (0, 2)
    again = compile_kernels(["a", "b"], 90, DRIVER, home)
    assert [(one.image, one.origin) for one in again.values()] == [(one.image, "kept") for one in first.values()]
    assert len(fake.compiled) == 2
    assert not [path for path in home.kernels.iterdir() if path.suffix != ".cubin"]


def test_everything_that_decides_the_code_is_in_the_key(fake: FakeCuda, sources: Path, home: Home) -> None:
    origins(home)
    assert origins(home, architecture=89) == {"a": "compiled", "b": "compiled"}
    assert origins(home, driver=(13, 1)) == {"a": "compiled", "b": "compiled"}
    fake.compiler = (13, 1)
    assert origins(home) == {"a": "compiled", "b": "compiled"}
    (sources.parent / "second" / "two.h").write_text("other\n")
    assert origins(home) == {"a": "compiled", "b": "kept"}
    (sources / "b.cu").write_text("kernel c\n")
    assert origins(home) == {"a": "kept", "b": "compiled"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_compiled_again(fake: FakeCuda, sources: Path, home: Home, damage: str) -> None:
    origins(home)
    path = next(home.kernels.glob("b-*.cubin"))
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        raw[-1] ^= 1
    path.write_bytes({"cut": raw[:-3], "flipped": raw, "empty": b"", "foreign": b"\x7fELF" * 40}[damage])
    assert origins(home) == {"a": "kept", "b": "compiled"}
    assert origins(home) == {"a": "kept", "b": "kept"}


def test_a_folder_that_cannot_be_written_costs_only_time(
    fake: FakeCuda, sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        assert origins(Home(tmp_path / "file")) == {"a": "compiled", "b": "compiled"}
    assert "compiled kernels cannot be kept" in caplog.text
    assert origins(Home(tmp_path / "file")) == {"a": "compiled", "b": "compiled"}


def test_what_does_not_compile_is_one_line(fake: FakeCuda, sources: Path, home: Home) -> None:
    fake.compile_log = b'b.cu(3): warning: unused\nb.cu(7): error: identifier "x" is undefined\n\n1 error\n'
    with pytest.raises(EngineError) as caught:
        compile_source(KernelSource.read("b"), 90)
    assert str(caught.value) == 'b.cu does not compile for sm_90: b.cu(7): error: identifier "x" is undefined'
    assert not home.kernels.exists()


def test_no_compiler(fake: FakeCuda, sources: Path, home: Home) -> None:
    fake.has_compiler = False
    with pytest.raises(ConfigError, match="run-time compiler is missing"):
        origins(home)


def test_every_kernel_of_the_package_finds_its_headers() -> None:
    names = list_kernels()
    assert {"expert", "nothing"} <= set(names)
    for name in names:
        assert KernelSource.read(name).text


def test_a_file_with_parts_is_compiled_apart(fake: FakeCuda, sources: Path, home: Home) -> None:
    (sources / "b.cu").write_text(
        "#if STRATA_IN(0)\nkernel x\n#endif\n#if STRATA_IN(1)\n#endif\n#if STRATA_IN(0)\n#endif\n"
    )
    assert {unit.unit for unit in list_units(["b", "a"])} == {"a", "b-0", "b-1"}
    assert list_units(["b", "a"])[-1].unit == "b-1"
    found = compile_kernels(["a", "b"], 90, DRIVER, home)
    assert {unit: one.file for unit, one in found.items()} == {"a": "a", "b-0": "b", "b-1": "b"}
    told = [options[3:] for source, _, options in fake.compiled if b"STRATA_IN" in source]
    assert sorted(told) == [(b"--define-macro=STRATA_PART=0",), (b"--define-macro=STRATA_PART=1",)]
    assert count_kept(90, DRIVER, home) == (3, 3)
    next(home.kernels.glob("b-1-*.cubin")).unlink()
    again = compile_kernels(["a", "b"], 90, DRIVER, home)
    assert {unit: one.origin for unit, one in again.items()} == {"a": "kept", "b-0": "kept", "b-1": "compiled"}


class Compiler:
    """Stands in for a process. ``units``: what all of them were given, in order."""

    def __init__(self, units: list[str], together: threading.Barrier) -> None:
        self.units, self.together, self.closed = units, together, False

    def compile(self, unit: KernelSource, architecture: int, defines: Sequence[str]) -> bytes:
        self.units.append(unit.unit)
        self.together.wait(60)
        return unit.unit.encode()

    def close(self) -> None:
        self.closed = True
        self.together.abort()


@pytest.fixture
def many(fake: FakeCuda, sources: Path) -> list[str]:
    """Files a to h, the later the longer."""
    names = list("abcdefgh")
    for number, name in enumerate(names):
        (sources / f"{name}.cu").write_text("//" + "x" * number * 100)
    return names


def test_all_processors_compile_longest_first_and_it_is_said(
    many: list[str], home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    units: list[str] = []
    made: list[Compiler] = []
    together = threading.Barrier(4)  # nobody goes on before four are at work
    monkeypatch.setattr(compiling, "usable_processors", lambda: 4)
    monkeypatch.setattr(compiling, "start_compiler", lambda: made.append(Compiler(units, together)) or made[-1])
    with caplog.at_level(logging.INFO):
        found = compile_kernels(many, 90, DRIVER, home)
    assert {name: one.image for name, one in found.items()} == {name: name.encode() for name in many}
    assert len(made) == 4
    assert all(one.closed for one in made)
    assert sorted(units[:4]) == ["e", "f", "g", "h"]
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "compiling 8 GPU kernel files for sm_90 on 4 processors, once for this card and driver"
    assert last.startswith("compiled 8 GPU kernel files for sm_90 in 0.")
    caplog.clear()
    compile_kernels(many, 90, DRIVER, home)
    assert not caplog.records, "what is kept is not worth a line"


def test_the_first_error_ends_all_compilers(many: list[str], home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Compiler] = []

    class Failing(Compiler):
        def compile(self, unit: KernelSource, architecture: int, defines: Sequence[str]) -> bytes:
            if unit.unit == "h":
                raise EngineError("h.cu does not compile")
            try:
                return super().compile(unit, architecture, defines)
            except threading.BrokenBarrierError:
                raise EngineError("ended") from None

    monkeypatch.setattr(compiling, "usable_processors", lambda: 4)
    together = threading.Barrier(5)  # never: the others work until they are ended
    monkeypatch.setattr(compiling, "start_compiler", lambda: made.append(Failing([], together)) or made[-1])
    with pytest.raises(EngineError, match=r"h\.cu does not compile"):
        compile_kernels(many, 90, DRIVER, home)
    assert all(one.closed for one in made)
    assert not home.kernels.exists()


def test_a_worker_compiles_as_this_process_does() -> None:
    worker, source = InWorker(), KernelSource.read("nothing")
    try:
        assert worker.compile(source, 90, ()) == compile_source(source, 90)
        assert worker.compile(source, 90, ("STRATA_STAMPED",)) == compile_source(source, 90, None, ("STRATA_STAMPED",))
        with pytest.raises(EngineError, match=r'x\.cu does not compile for sm_90: x\.cu\(1\): error: identifier "y"'):
            worker.compile(KernelSource("x", b"__device__ int x = y;", {}), 90, ())
        assert worker.compile(source, 89, ()) == compile_source(source, 89), "an error does not end it"
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"the process that compiles nothing\.cu ended \(status -9\)"):
            worker.compile(source, 90, ())
    finally:
        worker.close()


def test_where_no_process_starts_this_one_compiles(sources: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "b.cu").write_text('extern "C" __global__ void b() {}\n')
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert compile_kernels(["b"], 90, DRIVER, home)["b"].image[:4] == b"\x7fELF"


INTERRUPTED = """
import sys
from pathlib import Path
from strata import interrupts
interrupts.begin()
from strata.kernels.cuda import compile as compiling
from strata.paths import Home
interrupts.in_order()
start = compiling.start_compiler
def tell():
    started = start()
    print(started._process.pid, flush=True)
    return started
compiling.start_compiler = tell
try:
    compiling.compile_kernels(["linear", "pointwise"], 90, (13, 0), Home(Path(sys.argv[1])))
except KeyboardInterrupt:
    interrupts.tell()
    interrupts.end()
    raise SystemExit(interrupts.STATUS)
"""


def test_an_interruption_ends_the_compilers_and_leaves_nothing_half(home: Home) -> None:
    words = [sys.executable, "-c", INTERRUPTED, str(home.root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())  # at work for seconds
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert (process.returncode, told) == (130, b"strata: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert all(path.suffix == ".cubin" for path in home.root.rglob("*") if path.is_file())
