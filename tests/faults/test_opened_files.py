"""Every file that Strata opens, as a pipe, without an end, unreadable, or a folder: one line that names it, at once.

``FILES`` is the list. Two tests hold it complete: what commands really open below a home and a pack, and the places
in the sources that open anything. Unreadable is what Python's own ``open`` event refuses, which also holds for root.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from strata.cli.app import main
from strata.engine.rates import rates_key
from strata.kernels.cpu import pool
from tests.patience import PATIENCE_S
from tests.source_tree import PACKAGE, files

SMALL = PACKAGE / "data" / "small"
SECONDS = int(PATIENCE_S)  # of a command; one that waits for a pipe never ends
RUN = ("run", "PACK", "x", "--max-tokens", "1", "--device", "cpu")


@dataclass(frozen=True)
class Opened:
    """A file below the scene's folder. ``words``: a command that opens it. ``is_hint``: it only makes something better,
    so the command goes on and says what it did without, if anything."""

    name: str
    words: tuple[str, ...]
    is_hint: bool = False


FILES = (
    Opened("home/config.toml", RUN),
    Opened("home/calibration/RATES", ("plan", "PACK"), is_hint=True),
    Opened("pack/strata.toml", RUN),
    Opened("pack/tokenizer.json", RUN),
    Opened("pack/tokenizer_config.json", RUN),
    Opened("pack/generation_config.json", RUN),
    Opened("pack/expert-profile.json", RUN, is_hint=True),
    Opened("pack/manifest.json", RUN),
    Opened("pack/dense.safetensors", RUN),
    Opened("pack/expert-tables.safetensors", RUN),
    Opened("pack/experts-00000.bin", RUN),
    Opened("pack/table-00.rows", RUN),
    Opened("text.txt", ("bench", "cache", "PACK", "--text", "SCENE/text.txt")),
    Opened("hf/config.json", ("plan", "SCENE/hf")),
    Opened("hf/model.safetensors", ("inspect", "SCENE/hf")),
)
CONDITIONS = ("pipe", "endless", "unreadable", "folder")
_refused: set[str] = set()
_seen: list[str] | None = None


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str | os.PathLike):
        return
    path = os.path.abspath(os.fspath(arguments[0]))
    if path in _refused:
        raise PermissionError(errno.EACCES, "Permission denied", path)
    if _seen is not None:
        _seen.append(path)


@pytest.fixture(scope="session", autouse=True)
def _hooked() -> None:
    sys.addaudithook(hook)  # for the life of the process; without names it does nothing


@contextmanager
def refused(path: Path) -> Iterator[None]:
    _refused.add(str(path))
    try:
        yield
    finally:
        _refused.clear()


class Waits(BaseException):
    """Not for the program to catch."""


@contextmanager
def within_time() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Waits(f"still after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a pack of the built-in model's files, the large ones as links, and a checkpoint's first files."""
    for folder in ("home", "home/calibration", "pack", "hf"):
        (tmp_path / folder).mkdir()
    for file in SMALL.iterdir():
        if file.suffix in (".bin", ".rows"):  # a pack's other files may not be links (decision record 0117)
            (tmp_path / "pack" / file.name).symlink_to(file)
        elif file.is_file():
            shutil.copyfile(file, tmp_path / "pack" / file.name)
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "config.toml").write_text("")
    (tmp_path / "pack" / "strata.toml").write_text("")
    (tmp_path / "text.txt").write_text("x" * 10_000)
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    return tmp_path


def rates_file() -> str:
    return f"calibration/{rates_key(pool.default_threads()).path(Path()).name}"


def spoil(path: Path, condition: str) -> None:
    if condition == "unreadable":
        path.touch()
        return
    path.unlink(missing_ok=True)
    if condition == "pipe":
        os.mkfifo(path)
    elif condition == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def call(words: tuple[str, ...], scene: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    known = [word.replace("PACK", str(scene / "pack")).replace("SCENE", str(scene)) for word in words]
    with within_time():
        status = main(known)
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("opened", FILES, ids=lambda opened: opened.name)
def test_it_is_named_in_one_line(
    opened: Opened, condition: str, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scene / opened.name.replace("calibration/RATES", rates_file())
    spoil(path, condition)
    with refused(path) if condition == "unreadable" else within_time():
        status, lines = call(opened.words, scene, capsys)
    assert status == (0 if opened.is_hint else 2), lines
    (line,) = [line for line in lines if line.startswith(("warning: ", "strata: error: "))]
    assert line.startswith("warning: " if opened.is_hint else "strata: error: ")
    assert path.name in line
    assert not any("Traceback" in line or "unexpected" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(900)  # eight commands
def test_no_other_file_is_opened(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the commands of ``FILES``, and by ``inspect --check``, below the scene's folder."""
    global _seen
    (scene / "home" / rates_file()).touch()
    _seen = []
    try:
        for words in {opened.words for opened in FILES} | {("inspect", "PACK", "--check"), ("chat", "PACK", "hello")}:
            call(words, scene, capsys)
        opened = set(_seen)
    finally:
        _seen = None
    known = {opened.name.replace("calibration/RATES", rates_file()) for opened in FILES}
    below = {Path(path).relative_to(scene).as_posix() for path in opened if path.startswith(str(scene) + os.sep)}
    assert below - known == set()
    assert len(below) >= len(known) - 2  # what the list names is opened


# Files of the sources that read otherwise than by ``files.read_regular`` and ``open_regular``, and why they may.
OTHERWISE = {
    "checkpoint/dense_writer.py": "what this process has just written",
    "checkpoint/pack_folder.py": "a pack's own, looked at before",
    "checkpoint/pack_writer.py": "what this process has just written",
    "cli/app.py": "the null device",
    "cli/export.py": "what this process has just written",
    "cli/process_limits.py": "of the system",
    "cli/rm.py": "a lock, opened to write",
    "engine/cache_bench.py": "Python's own sources",
    "files.py": "the way to open",
    "kernels/bench.py": "of the system",
    "kernels/cpu/pool.py": "of the system",
    "kernels/cuda/compile.py": "sources of the package",
    "logs.py": "opened to write",
    "memory/bandwidth.py": "a file that this process has just written",
    "memory/linux.py": "of the system",
    "memory/probe.py": "of the system",
    "memory/surroundings.py": "of the system",
    "version.py": "of the package",
}
READS = re.compile(
    r"(?<![\w.])(?<!def )open\(|os\.open\(|\.read_text\(|\.read_bytes\("
    r"|\.open\(\s*[\"'][rwxa]b?\+?b?[\"']|fromfile\(|safe_open\("
)


def test_files_are_read_one_way() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in files() if READS.search(path.read_text(encoding="utf-8"))}
    assert found - set(OTHERWISE) == set(), "read it by strata.files, and add it to FILES above"
    assert set(OTHERWISE) - found == set(), "no longer true"


def test_a_history_of_the_line_editor_that_has_no_end(scene: Path) -> None:
    """It is read by a library, so it is looked at before."""
    from strata.cli import chat_lines

    for condition in ("pipe", "endless", "folder"):
        path = scene / "home" / "chat-history"
        if path.is_dir():
            path.rmdir()
        spoil(path, condition)
        with within_time():
            chat_lines._open_history()


@pytest.mark.parametrize("words", [RUN, ("bench", "cache", "PACK", "--text", "x\udcff"), ("inspect", "a\udcffb")])
def test_words_that_are_not_utf8(words: tuple[str, ...], scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = call((*words, "x\udcff"), scene, capsys)
    assert status == 2
    assert lines[0].startswith("strata: error: a word of the command: '")
    assert lines[0].endswith("\\xff' is not UTF-8 text") or "\\xff" in lines[0]


@pytest.mark.parametrize("name", ["STRATA_MODEL", "STRATA_LOG_FILE", "STRATA_HOME", "STRATA_THREADS"])
def test_variables_that_are_not_utf8(
    name: str, scene: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "a\udcff")
    status, lines = call(("run", "x", "--max-tokens", "1"), scene, capsys)
    assert (status, len(lines)) == (2, 2)
    assert "'a\\xff' is not UTF-8 text" in lines[0]


def test_without_a_home_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scene: Path
) -> None:
    def unknown(user: object) -> None:
        raise KeyError(user)

    for name in ("HOME", "STRATA_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for words in (("list",), RUN, ("doctor",), ("plan",)):
        status, lines = call(words, scene, capsys)
        assert status == 2, (words, lines)
        assert lines[0].startswith("strata: error: there is no home folder: HOME is not set")
        assert "set STRATA_HOME" in lines[1]
    monkeypatch.setenv("STRATA_HOME", str(scene / "home"))
    status, lines = call(("run", "~nobody-of-that-name/x", "x"), scene, capsys)
    assert (status, lines[0]) == (2, "strata: error: ~nobody-of-that-name/x: there is no home folder of that name")


@pytest.mark.parametrize(
    ("file", "status", "words"),
    [
        ("/dev/full", 2, "cannot be opened: No space left on device"),
        ("PIPE", 2, "No such device"),
        ("FOLDER", 2, "directory"),
    ],
)
def test_a_log_file_that_takes_nothing(
    file: str, status: int, words: str, scene: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(scene / "pipe")
    name = file.replace("PIPE", str(scene / "pipe")).replace("FOLDER", str(scene))
    found, lines = call((*RUN, "--log-file", name), scene, capsys)
    assert found == status
    assert lines[0].startswith(f"strata: error: --log-file {name} cannot be opened: ")
    assert words in lines[0]
    assert len(lines) == 2


def test_a_disk_that_fills_up_ends_the_log_and_not_the_work(
    scene: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on a file's size stands for a disk: what is beyond it is refused (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        status, lines = call((*RUN, "--log-file", str(scene / "log")), scene, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, kept)
    assert status == 0, lines
    (line,) = [line for line in lines if "--log-file" in line]
    assert line.startswith(f"warning: --log-file {scene / 'log'} is written no further: ")
    assert not any("Traceback" in line or "Logging error" in line for line in lines)
