"""Ctrl-C from the program's first line to the answer: real processes, interrupted at places spread over the start.

A place is a share of the modules that the start imports, which the interpreter tells as it goes: that does not depend
on how fast the machine is. What comes before the program's own first line is the interpreter's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from strata.cli import streaming
from strata.cli.app import main
from tests.patience import PATIENCE_S, end_by

IMPORTED = "import time:"
FIRST = "strata.cli"  # the first module that is imported after Ctrl-C is looked after
RUN = ("run", "x", "--max-tokens", "100000", "--ignore-eos", "--log-level", "error")
SERVE = ("serve", "--port", "0", "--log-level", "error")
MODULE, SCRIPT = ("-m", "strata"), ("-c", "import sys; from strata.console import run; sys.exit(run())")


@contextmanager
def starting(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        **options,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def imports_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Names of modules as they are imported, from the first after Ctrl-C is looked after."""
    assert process.stderr is not None
    begun = False
    for line in process.stderr:
        name = line.rpartition("|")[2].strip()
        begun = begun or name == FIRST
        if begun and line.startswith(IMPORTED):
            yield name


def said(process: subprocess.Popen[str]) -> list[str]:
    """What else it writes to standard error until it ends."""
    assert process.stderr is not None
    return [line.rstrip() for line in process.stderr if not line.startswith(IMPORTED) and line.strip()]


@pytest.fixture(scope="module")
def length() -> int:
    """Modules that the start imports until there is an answer, counted once; a server's start imports more."""
    with starting(*MODULE, "run", "x", "--max-tokens", "1") as process:
        return len(list(imports_of(process)))


CASES = [(MODULE, RUN, share) for share in (0, 0.03, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97, 0.999)]
CASES += [(SCRIPT, RUN, 0.2), (SCRIPT, RUN, 0.7), (MODULE, SERVE, 0.4), (MODULE, SERVE, 0.95)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "words", "share"), CASES)
def test_ctrl_c_at_any_place_of_the_start(
    length: int, way: tuple[str, ...], words: tuple[str, ...], share: float
) -> None:
    check_interrupted(way, words, int(share * length), may_answer=share > 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_ctrl_c_twice(length: int, share: float) -> None:
    check_interrupted(MODULE, RUN, int(share * length), presses=2, may_answer=share > 0.9)


def check_interrupted(
    way: tuple[str, ...], words: tuple[str, ...], place: int, presses: int = 1, may_answer: bool = False
) -> None:
    with starting(*way, *words) as process:
        for number, _ in enumerate(imports_of(process)):
            if number >= place:
                break
        for _ in range(presses - 1):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(said(process)))  # nobody waits for a full pipe
        reader.start()
        status = end_by(process)
        reader.join(PATIENCE_S)
    assert status == 130, lines
    assert lines == ["strata: interrupted"] or (may_answer and not lines), "an answer that is interrupted just ends"


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored() -> None:
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    with starting(*MODULE, "run", "x", "--max-tokens", "20", "--log-level", "error", **ignored) as process:
        for number, _ in enumerate(imports_of(process)):
            if number % 100 == 0:
                process.send_signal(signal.SIGINT)
        assert (process.wait(PATIENCE_S), said(process)) == (0, [])


def test_ctrl_c_in_the_demos_answer_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streaming, "stream_answer", lambda engine, request: 130)
    assert main(["demo", "--model", "built-in-random"]) == 130
    assert "identical" not in capsys.readouterr().out


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    prelude = "import os, signal, time\nfrom strata import interrupts\n"
    press = "def press() -> None:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.01)\n"
    words = [sys.executable, "-c", prelude + press + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_program_that_imports_strata_keeps_its_handlers() -> None:
    done = run_python("""
before = signal.getsignal(signal.SIGINT)
import strata, strata.config, strata.console, strata.cli.app
interrupts.in_order()
with interrupts.at_once(), interrupts.none_lost():
    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler
    try:
        press()
    except KeyboardInterrupt:
        print("its own")
assert signal.getsignal(signal.SIGINT) is before
""")
    assert (done.stdout, done.stderr, done.returncode) == ("its own\n", "", 0)


def test_it_ends_at_once_until_all_is_imported() -> None:
    code = """
interrupts.begin()
try:
    press()
finally:
    print("never")
"""
    done = run_python(code)
    assert (done.stdout, done.stderr, done.returncode) == ("", "strata: interrupted\n", 130)
    in_order = run_python(code.replace("try:", "interrupts.in_order()\ntry:"))
    assert in_order.stdout == "never\n"
    assert "KeyboardInterrupt" in in_order.stderr


def test_a_late_import_ends_at_once_too() -> None:
    done = run_python("""
interrupts.begin()
interrupts.in_order()
with interrupts.at_once():
    pass
try:
    press()
except KeyboardInterrupt:
    print("raised", flush=True)
with interrupts.none_lost(), interrupts.at_once():
    press()
""")
    assert (done.stdout, done.stderr, done.returncode) == ("raised\n", "strata: interrupted\n", 130)


def test_a_swallowed_interrupt_is_raised_at_the_end_of_the_block() -> None:
    done = run_python("""
interrupts.begin()
try:
    with interrupts.none_lost():
        try:
            press()
        except KeyboardInterrupt:
            print("swallowed")
except KeyboardInterrupt:
    print("raised")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
""")
    assert (done.stdout, done.stderr, done.returncode) == ("swallowed\nraised\n", "", 0)


def test_whoever_was_told_hears_no_other_press() -> None:
    done = run_python("""
interrupts.begin()
interrupts.in_order()
try:
    press()
except KeyboardInterrupt:
    interrupts.tell()
    press()
    press()
    print("quiet")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("quiet\n", "strata: interrupted\n", 0)


def test_other_threads_are_let_alone() -> None:
    done = run_python("""
import threading
interrupts.begin()
def work() -> None:
    with interrupts.at_once(), interrupts.none_lost():
        print(signal.getsignal(signal.SIGINT) is interrupts.end_at_once)
thread = threading.Thread(target=work)
thread.start()
thread.join()
""")
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
