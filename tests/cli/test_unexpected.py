"""The last resort: a line and a way out whatever the state of the process, and memory limits that are too tight."""

from __future__ import annotations

import builtins
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from strata import version
from strata.cli import process_limits, unexpected
from strata.cli.process_limits import describe_limits, refuse_too_little
from strata.cli.unexpected import tell_unexpected
from strata.errors import MemoryPlanError
from tests.patience import PATIENCE_S

HEAD = "Limit                     Soft Limit           Hard Limit           Units     \n"
ROW = "{:<26}{:<21}unlimited            bytes     \n"
Limits = Callable[..., None]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Limits:
    """Pretends that this process has these limits, in bytes by the system's names; no others."""

    def pretend(**sizes: int) -> None:
        rows = {"Max cpu time": "unlimited", **{name.replace("_", " "): str(size) for name, size in sizes.items()}}
        path = tmp_path / "limits"
        path.write_text(HEAD + "".join(ROW.format(name, size) for name, size in rows.items()))
        monkeypatch.setattr(process_limits, "SOURCE", path)

    pretend()
    return pretend


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_errors_of_memory_name_it_the_limit_and_a_way_out(
    error: Exception, limits: Limits, capsys: pytest.CaptureFixture[str]
) -> None:
    limits(Max_address_space=600_000_000, Max_data_size=200_000_000)
    tell_unexpected(error)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("strata: error: not enough memory")
    assert first.endswith("this process may have 600 MB of address space and 200 MB of data")
    assert second.startswith("  try: raise the limit (ulimit -v, ulimit -d, a container's), or close other programs")


def test_an_error_that_covers_one_of_memory(limits: Limits, capsys: pytest.CaptureFixture[str]) -> None:
    covering = ImportError("a module cannot be imported")
    covering.__context__ = MemoryError()
    tell_unexpected(covering)
    assert "not enough memory: a module cannot be imported\n" in capsys.readouterr().err
    silent = SystemError("error return without exception set")
    tell_unexpected(silent)
    assert "unexpected SystemError" in capsys.readouterr().err
    limits(Max_address_space=700_000_000)
    tell_unexpected(silent)
    assert "not enough memory" in capsys.readouterr().err


def refuse(*_: object, **__: object) -> str:
    raise MemoryError


def test_without_git_the_traceback_is_kept_all_the_same(
    limits: Limits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version, "describe", refuse)
    tell_unexpected(ValueError("x"))
    path = Path(capsys.readouterr().err.splitlines()[1].partition("report this with ")[2].partition(", which")[0])
    assert path.read_text().startswith(f"strata {version.VERSION}\n")


def test_a_traceback_that_cannot_be_kept(
    limits: Limits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "write_text", refuse)
    tell_unexpected(ValueError("x"))
    assert capsys.readouterr().err.splitlines() == [
        "strata: error: unexpected ValueError: x",
        "  try: report this; its traceback cannot be kept",
    ]


def test_a_line_where_nothing_works_any_more(
    limits: Limits, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(unexpected, "keep_traceback", refuse)
        tell_unexpected(ValueError("x"))
        patched.setattr(builtins, "print", refuse)
        tell_unexpected(ValueError("x"))
    first, _, second, way_out = capfd.readouterr().err.splitlines()
    assert first == second == "strata: error: not enough memory"
    assert way_out.startswith("  try: raise its limit")


def test_limits_that_are_too_little(limits: Limits) -> None:
    refuse_too_little()
    assert describe_limits() == ""
    limits(Max_address_space=10**12, Max_data_size=10**12)
    refuse_too_little()
    limits(Max_address_space=600_000_000)
    with pytest.raises(
        MemoryPlanError, match=r"may have 600 MB of address space, .* more than 640 MB .*ulimit -v"
    ) as caught:
        refuse_too_little()
    assert caught.value.short_bytes == 40_000_000


def test_a_system_that_tells_no_limits(limits: Limits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_limits, "SOURCE", tmp_path / "absent")
    refuse_too_little()
    assert describe_limits() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "size", "status"),
    [
        (resource.RLIMIT_AS, 600_000_000, 2),
        (resource.RLIMIT_DATA, 200_000_000, 2),
        (resource.RLIMIT_AS, 645_000_000, 1),
    ],
)
def test_the_program_within_tight_limits(limit: int, size: int, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strata", "run", "x", "--max-tokens", "2"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=dict(os.environ),
        preexec_fn=lambda: resource.setrlimit(limit, (size, size)),
    )  # fmt: skip
    first, second = done.stderr.splitlines()
    assert done.returncode == status
    assert first.startswith("strata: error: not enough memory")
    assert f"{size / 1e6:,.0f} MB of" in first
    assert "raise the limit (ulimit -v" in second


WATCHED = """
import os, signal, sys, time
from pathlib import Path
from strata.cli import process_limits
process_limits.SOURCE = Path(sys.argv[1])
from strata.cli.watched import fork_watched
fork_watched()
print(os.getppid(), flush=True)
exec(sys.argv[2])
"""


def watched(limits: Limits, then: str) -> subprocess.Popen[str]:
    """A process that goes on watched, and does ``then``. Its first line: the watcher's id."""
    limits(Max_address_space=700_000_000)
    words = [sys.executable, "-c", WATCHED, str(process_limits.SOURCE), then]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("then", "status", "how"),
    [
        ("os.abort()", 1, "signal 6"),
        ("os._exit(127)", 1, "status 127"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, "signal 11"),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("os._exit(130)", 130, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, ""),
    ],
)
def test_what_ends_a_process_without_a_word_gets_one(limits: Limits, then: str, status: int, how: str) -> None:
    out, told = (process := watched(limits, then)).communicate(timeout=PATIENCE_S)
    assert process.returncode == status
    assert int(out) == process.pid
    first = f"strata: error: not enough memory: the program was ended by {how}; this process may have "
    assert told.splitlines()[:1] == ([f"{first}700 MB of address space"] if how else [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_watcher_reach_the_program(limits: Limits, number: signal.Signals) -> None:
    then = (
        f"signal.signal({int(number)}, lambda *_: os._exit(0)); print('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    with watched(limits, then) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v", "d"])
@pytest.mark.parametrize("thousand_kib", [200, 260, 400, 640, 650, 660, 680, 700, 720, 760, 800, 850, 900, 1000, 2000])
def test_no_limit_of_memory_ends_without_naming_it(kind: str, thousand_kib: int) -> None:
    """``ulimit -v`` and ``-d``: an answer, or a last error that names memory, never a file."""
    limit, nbytes = {"v": resource.RLIMIT_AS, "d": resource.RLIMIT_DATA}[kind], thousand_kib * 1_024_000
    done = subprocess.run(
        [sys.executable, "-m", "strata", "run", "x", "--max-tokens", "2"],
        capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ),
        preexec_fn=lambda: resource.setrlimit(limit, (nbytes, nbytes)),
    )  # fmt: skip
    if done.returncode == 0:
        return
    *_, error, way_out = done.stderr.splitlines()
    assert done.returncode in (1, 2)
    assert error.startswith("strata: error: ")
    assert re.search("memory|threads cannot be started", error), error
    assert "ulimit" in way_out
