"""The native library was compiled as the arithmetic needs it, and is compiled again only where something changed."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from strata.version import VERSION
from tests.load_tool import load_tool


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build script, turned to a small tree of the test."""
    tool = load_tool("build_native")
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "shared.h").write_text("#pragma once\ninline int shared() { return 1; }\n")
    exported = 'extern "C" __attribute__((visibility("default")))'
    (sources / "one.cpp").write_text(f'#include "shared.h"\n{exported} int one() {{ return shared(); }}\n')
    (sources / "two.cpp").write_text(f"{exported} int two() {{ return 2; }}\n")
    monkeypatch.setattr(tool, "SOURCES", sources)
    monkeypatch.setattr(tool, "OBJECTS", tmp_path / "objects")
    monkeypatch.setattr(tool, "LIBRARY", tmp_path / "native" / "libsmall.so")
    return tool


def compiled(builder: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    """'N of M' files that a build compiled; '' when nothing was to be done."""
    builder.build()
    out = capsys.readouterr().out
    return out.partition("native library: ")[2].partition(" files")[0]


def test_builds_only_what_changed(builder: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(builder, capsys) == "3 of 3"
    assert ctypes.CDLL(str(builder.LIBRARY)).two() == 2
    assert compiled(builder, capsys) == ""
    (builder.SOURCES / "shared.h").write_text("#pragma once\ninline int shared() { return 7; }\n")
    assert compiled(builder, capsys) == "1 of 3", "only the file that includes the header"
    builder.BASE_FLAGS = [*builder.BASE_FLAGS, "-DANY=1"]
    assert compiled(builder, capsys) == "3 of 3", "flags are part of the key"
    (builder.SOURCES / "two.cpp").unlink()
    assert compiled(builder, capsys) == "1 of 2", "the table of flags changed"
    builder.LIBRARY.unlink()
    assert compiled(builder, capsys) == "0 of 2", "linked again from what is there"


def test_a_copied_checkout_is_built_from_its_own_files(
    builder: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.build()
    shutil.copytree(builder.SOURCES, tmp_path / "copy" / "csrc")
    shutil.copytree(builder.OBJECTS, tmp_path / "copy" / "objects")
    for name, path in (("SOURCES", "csrc"), ("OBJECTS", "objects"), ("LIBRARY", "native/libsmall.so")):
        monkeypatch.setattr(builder, name, tmp_path / "copy" / path)
    (builder.SOURCES / "two.cpp").write_text((builder.SOURCES / "two.cpp").read_text().replace("2;", "22;"))
    capsys.readouterr()
    assert compiled(builder, capsys) == "3 of 3"
    assert ctypes.CDLL(str(builder.LIBRARY)).two() == 22


def test_a_broken_source_is_named(builder: ModuleType) -> None:
    (builder.SOURCES / "two.cpp").write_text("int two( {")
    with pytest.raises(builder.BuildError, match=r"two\.cpp does not compile"):
        builder.build()
    assert not builder.LIBRARY.exists()


def test_an_undefined_symbol_is_found_at_the_build(builder: ModuleType) -> None:
    (builder.SOURCES / "two.cpp").write_text('int absent();\nextern "C" int two() { return absent(); }\n')
    with pytest.raises(builder.BuildError, match="does not link"):
        builder.build()


def test_no_compiler(builder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(builder.BuildError, match=r"Debian: g\+\+"):
        builder.build()


def test_instruction_sets_come_from_the_file_name(builder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("k_avx2", "k_avx512", "k_avxvnni", "avx2_notes", "k_scalar"):
        (builder.SOURCES / f"{name}.cpp").write_text("")
    monkeypatch.setattr(builder, "is_x86", lambda: True)
    sources = builder.list_sources()
    flags = {source.stem: set(builder.flags_of(source, sources)) for source in sources}
    assert "-mavx2" in flags["k_avx2"]
    assert "-mavx512vnni" in flags["k_avx512"]
    assert {"-mavxvnni", "-mavx2"} <= flags["k_avxvnni"]
    for baseline in ("avx2_notes", "k_scalar", "one"):
        assert not [flag for flag in flags[baseline] if flag.startswith("-m")]
    assert all("-DSTRATA_HAVE_AVX512=1" in one for one in flags.values())
    monkeypatch.setattr(builder, "is_x86", lambda: False)
    sources = builder.list_sources()
    assert {source.stem for source in sources} == {"one", "two", "avx2_notes", "k_scalar"}
    assert not any("HAVE_AVX" in flag for source in sources for flag in builder.flags_of(source, sources))


REQUIRED = {"-ffp-contract=off", "-fno-associative-math", "-fno-fast-math"}
FORBIDDEN = re.compile(r"-(ffast-math|Ofast|funsafe-math|fassociative-math|ffp-contract=(?!off)|march=(?!x86-64\b))")


def test_the_library_was_compiled_without_contraction() -> None:
    tool = load_tool("build_native")
    library = ctypes.CDLL(str(tool.LIBRARY))
    library.strata_build_info.restype = ctypes.c_char_p
    info = json.loads(library.strata_build_info())
    assert set(info["flags"]) == {source.name for source in tool.list_sources()}
    for flags in info["flags"].values():
        assert set(flags) >= REQUIRED
        assert not FORBIDDEN.search(" ".join(flags))


def test_the_compiler_itself_says_so() -> None:
    """GCC writes each command line into the library; what the build claims is compared with that."""
    tool = load_tool("build_native")
    content = tool.LIBRARY.read_bytes()
    recorded = [line.decode() for line in re.findall(rb"GNU C\+\+17 [^\0]+", content)]
    if "clang" in tool.compiler_version(tool.find_compiler()):
        recorded = [line.decode() for line in re.findall(rb"-O3 -std=c\+\+17[^\0]+", content)]
    assert recorded
    for line in recorded:
        assert "-ffp-contract=off" in line
        assert not FORBIDDEN.search(line)


@pytest.mark.slow
def test_the_wheel_serves_every_python(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=root, check=True, timeout=250)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"strata_moe-[\w.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {"strata/_native/libstrata_cpu.so", "strata/py.typed", "strata/_commit.txt"} <= names
        assert {name.partition("/")[0] for name in names} == {"strata", f"strata_moe-{VERSION}.dist-info"}
        listed = subprocess.run(["git", "ls-files", "src/strata"], cwd=root, capture_output=True, text=True, check=True)
        assert {name.removeprefix("src/") for name in listed.stdout.split()} <= names, "a file is in no package data"
        archive.extractall(tmp_path / "unpacked")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from strata.cli.app import main; main(['--version'])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "unpacked")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    recorded = (tmp_path / "unpacked" / "strata" / "_commit.txt").read_text().strip()
    assert result.stdout.strip().endswith(f"({recorded})")
