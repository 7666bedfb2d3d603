"""Nouns after numbers, and commands that can be typed as they are printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strata import words


def test_one_is_singular() -> None:
    assert [words.count_of(number, "token") for number in (0, 1, 2, 1024)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1,024 tokens",
    ]


def test_the_script_is_named_where_the_shell_does_not_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / ".venv" / "bin" / "strata"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert words.program() == ".venv/bin/strata"
    assert words.with_program("look with: strata inspect x; strata keeps ~/strata run") == (
        "look with: .venv/bin/strata inspect x; strata keeps ~/strata run"
    )
    monkeypatch.setenv("PATH", str(script.parent))
    assert words.with_program("strata run") == "strata run"
    monkeypatch.setattr(sys, "argv", ["/elsewhere/pytest"])
    monkeypatch.setenv("PATH", "")
    assert words.program() == "strata"
