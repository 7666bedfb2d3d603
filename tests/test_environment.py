"""The check of a machine names what is missing, and an environment that is current is left alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.load_tool import load_tool

CHECK = Path(__file__).resolve().parent.parent / "tools" / "check.sh"


def executable(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that is the whole PATH: the plain tools, one good Python and one good compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "df", "awk", "mktemp", "rm", "head"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    executable(folder, "python3", f'exec "{sys.executable}" "$@"')
    executable(folder, "g++", "exit 0")
    return folder


def check(machine: Path, **variables: str) -> tuple[int, str, list[str]]:
    environment = {"PATH": str(machine), **variables}
    result = subprocess.run(
        [str(machine / "sh"), str(CHECK)], env=environment, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout.strip(), result.stderr.splitlines()


def test_a_good_machine(machine: Path) -> None:
    assert check(machine) == (0, "python3", [])


def test_everything_missing_is_named_at_once(machine: Path) -> None:
    (machine / "python3").unlink()
    (machine / "g++").unlink()
    status, out, lines = check(machine)
    assert (status, out) == (2, "")
    assert [line for line in lines if "no Python 3.11 or newer" in line]
    assert [line for line in lines if "no C++ compiler" in line]
    ways = [line for line in lines if line.startswith("  try: ")]
    assert len(ways) == 2
    for line in ways:
        assert all(word in line for word in ("apt install", "dnf install", "pacman -S"))


def test_an_old_python_is_passed_over(machine: Path) -> None:
    shutil.move(machine / "python3", machine / "python3.12")
    executable(machine, "python3", '[ "$1" = --version ] && echo Python 3.9.2 && exit 0; exit 1')
    assert check(machine)[:2] == (0, "python3.12")
    (machine / "python3.12").unlink()
    status, _, lines = check(machine)
    assert status == 2
    assert "Python 3.9.2" in lines[0]


def test_a_python_without_pip_or_venv(machine: Path) -> None:
    executable(machine, "python3", f'case "$2" in *ensurepip*) exit 1;; esac; exec "{sys.executable}" "$@"')
    status, _, lines = check(machine)
    assert status == 2
    assert "ensurepip is missing" in lines[0]
    assert "python3-venv" in lines[1]


def test_the_named_python_is_taken_or_refused(machine: Path) -> None:
    assert check(machine, PYTHON=sys.executable)[:2] == (0, sys.executable)
    status, out, lines = check(machine, PYTHON="/nonexistent/python")
    assert (status, out) == (2, "")
    assert "PYTHON=/nonexistent/python" in lines[0]


def test_a_compiler_that_is_too_old(machine: Path) -> None:
    executable(machine, "g++", '[ "$1" = --version ] && echo g++ 4.8; [ "$1" = --version ]')
    status, _, lines = check(machine)
    assert status == 2
    assert "does not compile C++17 (g++ 4.8)" in lines[0]


def test_a_full_disk(machine: Path) -> None:
    (machine / "df").unlink()
    executable(machine, "df", "echo header; echo disk 100 90 1048576 90% /")
    status, _, lines = check(machine)
    assert status == 2
    assert "1024 MiB of disk free here, 3072 MiB are needed" in lines[0]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tool = load_tool("environment")
    for name in tool.KEYED:
        (tmp_path / name).write_text("x")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(tool, "STAMP", tmp_path / ".venv" / "stamp.json")
    return tool


def test_an_environment_is_current_until_what_it_was_made_from_changes(environment: ModuleType) -> None:
    assert not environment.is_current(set())
    environment.STAMP.write_text(json.dumps({"key": environment.key(), "extras": ["dev"]}))
    assert environment.is_current(set())
    assert environment.is_current({"dev"})
    assert not environment.is_current({"dev", "cuda"})
    (environment.ROOT / "constraints.txt").write_text("y")
    assert not environment.is_current({"dev"})
    environment.STAMP.write_text("{ cut short")
    assert not environment.is_current(set())


@pytest.mark.parametrize(
    ("needs", "build"),
    [
        (["filelock", "sympy>=1.13"], "cpu"),
        (["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"], "cuda"),
        (["filelock", "nvidia-thing; extra == 'other'"], "cpu"),
        (None, "present"),
    ],
)
def test_the_size_is_known_before_the_download(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, needs: list[str] | None, build: str
) -> None:
    def pip(*words: str) -> None:
        assert "--dry-run" in words
        install = [] if needs is None else [{"metadata": {"requires_dist": needs}}]
        Path(words[words.index("--report") + 1]).write_text(json.dumps({"install": install}))

    (environment.ROOT / "constraints.txt").write_text("numpy==2.0\ntorch==2.13.0\n")
    monkeypatch.setattr(environment, "pip", pip)
    assert environment.torch_build() == build


def test_a_disk_that_cannot_hold_it_stops_before_the_download(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "torch_build", lambda: "cuda")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=4_000_000_000))
    with pytest.raises(SystemExit) as stopped:
        environment.announce({"dev"})
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert "CUDA build of PyTorch (several GB)" in captured.out
    assert "4000 MB of disk free here" in captured.err


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free
