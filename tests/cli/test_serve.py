"""``strata serve`` as a process: it serves the model, ends in order, and says its mistakes before it loads anything."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from strata.cli.app import main
from tests.patience import PATIENCE_S, end_by


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strata", "serve", "built-in-random", "--port", "0", "--max-context", "2048", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"serving built-in-random at (http://127\.0\.0\.1:\d+)/v1", line)
        if found:
            return process, found[1]
    raise AssertionError(f"it ended with {process.wait()}")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_serves_and_ends_in_the_middle_of_an_answer(number: int, status: int) -> None:
    process, url = start()
    with process:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        seen: list[str] = []
        first = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    seen.append(line)
                    first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(PATIENCE_S)
        assert end_by(process, number) == status
        reader.join(PATIENCE_S)
        assert "the server is stopping" in "".join(seen)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--host", "0.0.0.0"), "only this PC is served, since there is no authentication yet"),
        (("--port", "99999"), "--port 99999 is no port"),
        (("absent-model",), "no model 'absent-model'"),
        (("--device", "cuda"), "cuda"),
    ],
)
def test_mistakes_are_one_line_and_a_hint(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["serve", "--port", "0", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("strata: error", "  try: "))]
    assert len(lines) == 2
    assert message in lines[0]


def test_what_serving_makes_of_options_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--show-config"]) == 0
    assert "a chat answer runs to the end of its context" in capsys.readouterr().out
    assert main(["serve", "--show-config", "--max-tokens", "5"]) == 0
    assert "a chat answer" not in capsys.readouterr().out


def test_a_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child's as well
    try:
        process, url = start()
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 200
        assert end_by(process, signal.SIGTERM) == 143
