"""``strata run``, ``verify`` and ``demo`` as a user types them, on the built-in model and on bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata.cli.app import main
from strata.cli.model_words import split_model_and_prompt
from strata.errors import ConfigError


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random model: its tokens are bytes, and it is there whether or not the trained one was installed."""
    monkeypatch.setenv("STRATA_HOME", str(home))
    monkeypatch.setenv("STRATA_MODEL", "built-in-random")


def test_run_streams_the_same_completion(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "def f(x):", "--max-tokens", "12", "--ignore-eos"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def f(x):")
    assert "prompt: 9 tokens read in" in first.err
    assert "decode: 12 tokens, 11 rounds" in first.err
    assert "1.00 tokens a round" in first.err
    assert main(words) == 0
    assert capsys.readouterr().out == first.out


def test_an_empty_prompt_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr("strata.cli.loading.load_engine", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for words in (["run", ""], ["run", "small", ""], ["run", "-"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("strata: error: the prompt is empty")


def test_run_reads_a_pipe_and_a_chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert main(["run", "-", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("piped")
    assert main(["run", "--chat", "hello", "--max-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], (None, None)), (["text here"], (None, "text here")), (["a", "b"], ("a", "b"))],
)
def test_model_and_prompt(words: list[str], expected: tuple[str | None, str | None]) -> None:
    assert split_model_and_prompt(words) == expected


def test_one_existing_path_is_a_model(tmp_path: Path) -> None:
    assert split_model_and_prompt([str(tmp_path)]) == (str(tmp_path), None)
    assert split_model_and_prompt(["x" * 10000]) == (None, "x" * 10000)
    with pytest.raises(ConfigError, match="3 words"):
        split_model_and_prompt(["a", "b", "c"])


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def bad_models(folder: Path) -> dict[str, Path]:
    awq = {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": {"quant_method": "awq"}}
    write(folder / "awq" / "config.json", json.dumps(awq))
    write(folder / "awq" / "model.safetensors", b"\2\0\0\0\0\0\0\0{}")
    (folder / "empty").mkdir()
    return {
        "GGUF": write(folder / "m.gguf", b"GGUF\3\0\0\0" + bytes(64)),
        "AWQ": folder / "awq",
        "empty": folder / "empty",
        "no such path": folder / "nowhere",
        "unknown kind": write(folder / "notes.txt", "hello"),
    }


@pytest.mark.parametrize("command", [["run"], ["verify"], ["demo"]])
@pytest.mark.parametrize("kind", ["GGUF", "AWQ", "empty", "no such path", "unknown kind"])
def test_what_is_not_read_is_refused_in_one_line(
    command: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bad_models(tmp_path)[kind]
    words = [*command, str(path), *(["hello"] if command == ["run"] else [])]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert kind in error
    assert len(error.strip().splitlines()) == 2
    assert "try:" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run"], "no prompt was given"),
        (["run", "x", "--temperature", "hot"], "--temperature"),
        (["run", "x", "--device", "cuda:0"], "--device cpu"),
        (["run", "x", "--max-context", "100000"], "positions of the model"),
        (["run", "x" * 200, "--max-context", "100"], "200 tokens"),
        (["verify", "--prompts", "1,zero"], "--prompts"),
        (["run", "x", "--stop", ""], "--stop: an empty text"),
        (["verify", "--arm", "no such arm"], "no arm is called no such arm"),
        (["demo", "--vram-gib", "0"], "--vram-gib"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_input_that_is_no_utf8_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8", errors=errors))
        assert main(["run", "-"]) == 2
        assert "standard input is not UTF-8 text" in capsys.readouterr().err
    assert main(["bench", "cache", "--text", str(tmp_path / "bad.txt")]) == 2
    assert "is not UTF-8 text at byte 2" in capsys.readouterr().err


def test_verify_counts_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--prompts", "1,100", "--tokens", "12", "--arm", "path 3", "--only-model"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " of " in line[:8]]
    assert [row[:6] for row in rows] == ["1 of 3", "2 of 3", "3 of 3"]


def test_verify_prints_a_row_an_arm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--prompts", "1,100", "--tokens", "12", "--arm", "arena, path 3,", "--json", "--only-model"]
    assert main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("verdict") for row in rows] == ["identical", "identical", None]
    assert rows[0]["logits_sha256"] == rows[1]["logits_sha256"]
    assert rows[1]["counters"]["staged_bytes"] > 0
    assert rows[1]["prompts"] == [1, 100]
    assert sum(rows[1]["tiers_met"].values()) == rows[1]["counters"]["num_calls"]
    assert rows[2] == {"good": True, "rows": 2}


def test_show_config_says_what_is_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "x", "--threads", "1", "--vram-reserve-mib", "10", "--show-config"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "command line" in lines["--threads"]
    assert "in force" in lines["--threads"]
    assert "refused: no CUDA device is in use" in lines["--vram-reserve-mib"]


def test_the_demo_ends_identical(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strata", "demo", "--prompt", "def add(a, b):\n    "],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in ("found:", "no GPU: running on the CPU", "in every RAM mode", "what this PC could run", "next:"):
        assert text in done.stdout, text
    assert done.stdout.count("identical") == 7
    assert "Traceback" not in done.stderr
