"""Every ending of the program: one line, a hint, a status; and options that reach a command however they are given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from strata import version
from strata.cli import app
from strata.cli.configure import Configure
from strata.config import OPTIONS, Requested
from strata.config_sources import Effect
from strata.errors import CheckpointError, EngineError, MemoryPlanError
from tests.patience import PATIENCE_S, end_by

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def seen() -> dict[str, Any]:
    """What the command was called with."""
    return {}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: dict[str, Any]) -> Run:
    """Runs a command line against two commands of the test: `say`, which takes a model, and `plain`, which does not."""

    def say(
        configure: Configure,
        prompt: Annotated[str, typer.Argument(help="The text.")],
        pack: Annotated[str | None, typer.Option(help="The model.")] = None,
    ) -> int:
        requested = configure(pack, effects=lambda requested: [Effect("device", in_force=False, why="no card")])
        seen.update(requested=requested, prompt=prompt)
        error = seen.get("error")
        if error is not None:
            raise error
        return int(seen.get("status", 0))

    def plain(name: str = "nobody") -> None:
        seen.update(name=name)

    modules = {"say": say, "plain": plain}
    for name, function in modules.items():
        module = types.ModuleType(f"strata_test_{name}")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    commands = tuple(app.Command(name, f"strata_test_{name}", f"Does {name}.") for name in modules)
    monkeypatch.setattr(app, "COMMANDS", (*commands, app.Command("absent", "strata_test_absent", "Is not there.")))

    def call(*words: str) -> tuple[int, str, str]:
        status = app.main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_help_lists_commands_and_imports_none_of_them(run: Run) -> None:
    for words in ((), ("--help",), ("-h",)):
        status, out, err = run(*words)
        assert (status, err) == (0, "")
        assert "Does say." in out
        assert "Is not there." in out, "a command's module is not needed to list it"


def test_help_of_a_command_names_every_flag(run: Run) -> None:
    status, out, _ = run("say", "--help")
    assert status == 0
    for one in OPTIONS:
        assert not one.flag or one.flag in out
    assert "--show-config" in out


def test_version(run: Run) -> None:
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith(f"strata {version.VERSION}")


def test_version_without_git(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("PATH", "")
    status, out, err = run("--version")
    assert (status, out, err) == (0, f"strata {version.VERSION}\n", "")


def test_options_reach_the_command(run: Run, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_KV", "32")
    monkeypatch.setenv("STRATA_MMAP_EXPERTS", "1")
    status, _, err = run("say", "hello", "--vram-gib", "24", "--no-mmap-experts", "--no-prefill-borrow", "--pack", "p")
    assert (status, err) == (0, "")
    requested: Requested = seen["requested"]
    assert seen["prompt"] == "hello"
    assert (requested.model, requested.vram_gib, requested.kv) == ("p", 24.0, 32)
    assert (requested.mmap_experts, requested.origin("mmap_experts")) == (False, "command line")
    assert not requested.prefill_borrow


def test_the_models_own_file_is_read(run: Run, seen: dict[str, Any], tmp_path: Path, session_home: Path) -> None:
    (tmp_path / "strata.toml").write_text("max_context = 2048\n")
    assert run("say", "x", "--pack", str(tmp_path))[0] == 0
    assert seen["requested"].origin("max_context") == "model file"
    named = session_home / "models" / "mine"
    named.mkdir(parents=True)
    (named / "strata.toml").write_text("kv = 32\n")
    assert run("say", "x", "--model", "mine")[0] == 0
    assert seen["requested"].kv == 32
    single = tmp_path / "one.gguf"
    single.write_bytes(b"")
    (tmp_path / "one.gguf.toml").write_text("kv = 32\n")
    assert run("say", "x", "--model", str(single))[0] == 0
    assert seen["requested"].kv == 32


def test_model_named_twice(run: Run) -> None:
    status, _, err = run("say", "x", "--pack", "a", "--model", "b")
    assert status == 2
    assert err.splitlines() == ["strata: error: the model is named twice: a and --model b", "  try: leave one out"]


def test_show_config(run: Run, seen: dict[str, Any]) -> None:
    status, out, _ = run("say", "x", "--threads", "3", "--show-config")
    assert status == 0
    assert "requested" not in seen, "the command ends there"
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert len(lines) == len(OPTIONS)
    assert lines["--device"].endswith("refused: no card")
    assert lines["--threads"].split()[1:4] == ["3", "command", "line"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("nonsense",), "No such command 'nonsense'", "strata --help"),
        (("say",), "Missing argument", "strata say --help"),
        (("say", "x", "--nonsense"), "No such option", "strata say --help"),
        (("say", "x", "--vram-gib", "lots"), "--vram-gib: 'lots' (from the command line)", "give a number above 0"),
        (("say", "x", "--kv", "int8"), "--kv: 'int8'", "not implemented in this version"),
        (("plain", "--log-level", "loud"), "--log-level: 'loud'", "error, warning, info, debug"),
        (("plain", "--vram-gib", "3"), "No such option", "strata plain --help"),
        (("plain", "--log-file", "/nonexistent/x.log"), "cannot be opened", "name a file"),
    ],
)
def test_mistakes_are_one_line_and_a_hint(run: Run, words: tuple[str, ...], message: str, hint: str) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("strata: error: ")
    assert message in first
    assert second.startswith("  try: ")
    assert hint in second


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointError("a.safetensors is cut short:\n 10 of 20 bytes", "fetch it again"), 2),
        (MemoryPlanError("2.0 GiB short", "give --mmap-experts", short_bytes=2 << 30), 2),
        (EngineError("a worker died", "run strata doctor"), 1),
    ],
)
def test_named_errors(run: Run, seen: dict[str, Any], error: Exception, status: int) -> None:
    seen["error"] = error
    found, out, err = run("say", "x")
    assert (found, out) == (status, "")
    assert len(err.splitlines()) == 2


def test_the_unexpected_leaves_its_traceback_in_a_file(run: Run, seen: dict[str, Any], session_home: Path) -> None:
    seen["error"] = RuntimeError("two\nlines")
    status, out, err = run("say", "x")
    assert (status, out) == (1, "")
    first, second = err.splitlines()
    assert first == "strata: error: unexpected RuntimeError: two lines"
    path = Path(second.partition("report this with ")[2].partition(", which")[0])
    assert path.parent == session_home / "logs"
    assert "Traceback" in path.read_text()
    assert 'RuntimeError("two' not in err


def test_the_unexpected_where_no_home_can_be_made(
    run: Run, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "file" / "home"))
    seen["error"] = RuntimeError("x")
    status, _, err = run("say", "x")
    assert status == 1
    assert Path(err.splitlines()[1].partition("report this with ")[2].partition(", which")[0]).exists()


def test_statuses(run: Run, seen: dict[str, Any]) -> None:
    seen["status"] = 1
    assert run("say", "x")[0] == 1
    assert run("plain")[0] == 0
    seen["error"] = KeyboardInterrupt()
    assert run("say", "x")[0] == 130


def test_serve_is_also_an_option(run: Run, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "COMMANDS", (app.Command("serve", "strata_test_plain", "Serves."),))
    assert run("--serve", "--name", "x")[0] == 0
    assert seen["name"] == "x"


def test_stray_variables_are_warned_about_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_VRAM_GIG", "3")
    status, _, err = run("say", "x")
    assert status == 0
    assert err == "warning: STRATA_VRAM_GIG is set but no option reads it; did you mean STRATA_VRAM_GIB?\n"
    assert run("say", "x", "--log-level", "error")[2] == ""


SLEEPER = """
import sys, types
from strata.cli import app
module = types.ModuleType("sleeper")
def command() -> None:
    import time
    print("started", flush=True)
    time.sleep(100_000)
def flood() -> None:
    for line in range(100000):
        print("line", line)
def speak() -> None:
    print("gr\u00f6\u00dfer \u2500")
module.command = {"flood": flood, "sleep": command, "speak": speak}[sys.argv[1]]
sys.modules["sleeper"] = module
app.COMMANDS = (app.Command("go", "sleeper", "Goes."),)
sys.exit(app.main(["go"]))
"""


def test_ctrl_c_ends_with_130_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, "sleep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        assert end_by(process, signal.SIGINT) == 130
        assert process.stderr.read() == "strata: interrupted\n"


def test_a_closed_pipe_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, "flood"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 141
        assert process.stderr.read() == ""


def test_a_terminal_that_cannot_show_a_character() -> None:
    command = [sys.executable, "-c", SLEEPER, "speak"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"gr??er ?\n", b"")


def script(*words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "strata", *words], stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_standard_output_is_one_line(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        child = script("--version", stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
        _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 1
    assert "standard output cannot be written: No space left on device" in err
    assert len(err.splitlines()) == 2


def test_a_closed_standard_output_harms_nothing() -> None:
    words = [sys.executable, "-m", "strata", "--version"]
    closed = 'exec "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", closed, "sh", *words], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_during_the_import_of_the_commands(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(100_000)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    child = script("--version", env={**os.environ, "PYTHONPATH": path})
    _, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err) == (130, "strata: interrupted\n")
