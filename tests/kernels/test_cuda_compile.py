"""Kernels are compiled once for what decides them, kept whole, and made again where the kept file is damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from strata.errors import ConfigError, EngineError
from strata.kernels.cuda import compile as compiling
from strata.kernels.cuda.compile import KernelSource, compile_kernels, compile_source, count_kept, list_kernels
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
