"""``strata list`` and ``strata rm``: what is shown, what is refused, and removals that were interrupted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.checkpoint.random_model import write_random_pack
from strata.cli import rm
from strata.cli.app import main
from strata.errors import CheckpointError
from strata.models import find
from tests.cli.test_packs import CONFIG

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_pack(tmp_path_factory.mktemp("packs") / "tiny", CONFIG, find)


@pytest.fixture
def models(tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    models = tmp_path / "home" / "models"
    shutil.copytree(pack, models / "tiny")
    return models


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "absent"))
    status, out, _ = run("list")
    assert status == 0
    assert out.startswith("no models in ")
    assert run("list", "--json")[1] == ""


def test_list(models: Path, run: Run) -> None:
    (models / "odd").mkdir()
    (models / "odd" / "x.gguf").write_bytes(b"GGUF")
    shutil.copytree(models / "tiny", models / "bad")
    (models / "bad" / "manifest.json").write_text('{"format": "strata-pack", "version": 1}')
    (models / "half.unfinished").mkdir()
    (models / "half.unfinished" / "x").write_text("x")
    (models / "a file").write_text("x")
    status, out, err = run("list")
    assert (status, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["name", "size", "format", "family"]
    found = {row.split()[0]: row for row in rows}
    assert sorted(found) == ["bad", "half.unfinished", "odd", "tiny"]
    size = sum(file.stat().st_size for file in (models / "tiny").iterdir())
    assert f"{size / 1024:.2f} KiB" in found["tiny"]
    assert "pack, nvfp4" in found["tiny"]
    assert found["tiny"].endswith("qwen3_moe")
    assert "cannot be read" in found["bad"]
    assert "an unfinished Strata pack" in found["half.unfinished"]
    assert "a GGUF file" in found["odd"]
    lines = [json.loads(line) for line in run("list", "--json")[1].splitlines()]
    assert {line["name"]: line["bytes"] for line in lines}["tiny"] == size


def test_rm(models: Path, run: Run) -> None:
    shutil.copytree(models / "tiny", models / "other")
    status, out, err = run("rm", "tiny", "--yes")
    assert (status, err) == (0, "")
    assert out.startswith("removed tiny: ")
    assert [path.name for path in models.iterdir()] == ["other"]


def test_rm_asks(models: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run("rm", "tiny")
    assert status == 2
    assert "nobody can be asked" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for word, gone in (("", False), ("n", False), ("yes please", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda question, word=word: word)
        assert run("rm", "tiny")[0] == (0 if gone else 1)
        assert (models / "tiny").exists() == (not gone)


@pytest.mark.parametrize("name", ["..", ".", "../models/tiny", "tiny/", "absent", ".tiny", "/", "tiny/../tiny"])
def test_rm_takes_names_alone(models: Path, run: Run, name: str) -> None:
    status, _, err = run("rm", "--yes", "--", name)
    assert (status, len(err.splitlines())) == (2, 2)
    assert (models / "tiny" / "manifest.json").exists()


def test_rm_refuses_what_is_not_a_pack(models: Path, run: Run, tmp_path: Path, pack: Path) -> None:
    (models / "notes").mkdir()
    (models / "notes" / "mine.txt").write_text("x")
    (models / "empty").mkdir()
    (models / "link").symlink_to(pack)
    (models / "file").write_text("x")
    for name, words in (("notes", "not a pack"), ("empty", "not a pack"), ("link", "is a link"), ("file", "no model")):
        status, _, err = run("rm", "--yes", name)
        assert status == 2
        assert words in err
        assert (models / name).exists()
    assert (pack / "manifest.json").exists()


HOLDER = """
import os, sys
lock = open(sys.argv[1], "wb")
os.lockf(lock.fileno(), os.F_TLOCK, 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def unfinished(models: Path) -> Path:
    folder = models / "half.unfinished"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "dense.safetensors").write_bytes(b"half")
    return folder


def test_rm_of_an_unfinished_pack(unfinished: Path, run: Run) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(unfinished / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"held\n"
        status, _, err = run("rm", "--yes", "half.unfinished")
        assert status == 2
        assert "is being written by another strata process" in err
        writer.kill()
    assert run("rm", "--yes", "half.unfinished")[0] == 0
    assert not unfinished.exists()


def test_an_interrupted_removal_leaves_nothing_that_loads(
    models: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata.engine.models import open_model

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        assert run("rm", "--yes", "tiny")[0] == 130
    left = [path.name for path in models.iterdir()]
    assert len(left) == 1
    for name in ("tiny", left[0]):
        with pytest.raises(CheckpointError):
            open_model(name)
    assert "no models" in run("list")[1]
    assert run("rm", "--yes", "anything")[0] == 2
    assert list(models.iterdir()) == [], "the next removal finishes it"


def test_what_the_system_refuses_is_one_line(models: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rm.os, "rename", refuse)
    status, _, err = run("rm", "--yes", "tiny")
    assert status == 2
    assert "cannot be removed: Permission denied" in err
    assert os.listdir(models) == ["tiny"]
