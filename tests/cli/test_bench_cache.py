"""``strata bench cache`` as a user types it, on the built-in random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.cli.app import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, dict[str, float]]]:
    assert main(["bench", "cache", "--model", "built-in-random", "--tokens", "400", *words]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])["figures"]


def test_no_policy_passes_the_clairvoyant_and_more_slots_hit_more(capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = run(capsys)
    assert "clairvoyant" in out
    for share in (5, 10, 20, 30, 40, 50, 75):
        best = figures[f"hit_rate_clairvoyant_{share}"]["value"]
        for policy in ("profile", "lru", "decayed"):
            assert figures[f"hit_rate_{policy}_{share}"]["value"] <= best
    rates = [figures[f"hit_rate_profile_{share}"]["value"] for share in (5, 20, 50, 75)]
    assert rates == sorted(rates)


def test_a_file_of_text_is_taken_and_the_record_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x + 1\n" * 20)
    _, figures = run(capsys, "--text", str(text), "--out", str(tmp_path), "--machine", "m")
    kept = json.loads((tmp_path / "m" / "cache.json").read_text())
    assert kept["figures"] == figures
    assert kept["machine"]["profile"] == "learned from the text's first half"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cache", "--text", "no-such-file.txt"], "no-such-file.txt"),
        (["nothing"], "kernels, cache"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words, *(["--model", "built-in-random"] if "cache" in words else [])]) == 2
    assert said in capsys.readouterr().err


def test_a_text_that_is_too_short_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ab")
    assert main(["bench", "cache", "--model", "built-in-random", "--text", str(tmp_path / "short.txt")]) == 2
    assert "2 tokens" in capsys.readouterr().err
