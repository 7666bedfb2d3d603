"""``strata plan`` as a user types it: shapes, a bare config.json, a folder, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.cli.app import main
from strata.models.known_shapes import KNOWN_SHAPES

GIB = 1 << 30


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_known_shape_on_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("flash-next", "--device", "cuda", "--vram-gib", "24", "--ram-gib", "60")
    plan = planned(capsys, *words)
    assert plan["plan_only"]
    assert plan["mode"] == "resident"
    assert plan["expert_bytes"] == 2_764_800
    assert sum(plan["vram"].values()) <= 24 * GIB < sum(plan["vram"].values()) + 2_764_800
    assert sum(plan["ram"].values()) <= 60 * GIB
    assert plan["experts_in_vram"] + plan["experts_in_ram"] >= plan["experts_in_all"] == 48 * 512
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "RAM mode resident (arena does not fit)" in out
    assert "no card that could be used is in this machine" in out


def test_options_act(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("flash-next", "--device", "cuda", "--vram-gib", "24", "--ram-gib", "128")
    plan = planned(capsys, *common, "--expert-cache", "100", "--resident-budget-gib", "10", "--max-context", "16384")
    assert (plan["slots"], plan["mode"], plan["context"]) == (100, "budget", 16384)
    assert plan["ram"]["expert copy"] == 10 * GIB // 2_764_800 * 2_764_800
    small, large = (planned(capsys, *common, "--max-context", n)["slots"] for n in ("8192", "65536"))
    assert small > large


def test_a_config_and_a_folder_without_weights_are_the_shape_they_describe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_SHAPES["qwen3-30b"]))
    shape = planned(capsys, "qwen3-30b", "--ram-gib", "64")
    for source in (tmp_path / "config.json", tmp_path):
        plan = planned(capsys, str(source), "--ram-gib", "64")
        differing = {name for name in plan if plan[name] != shape[name]}
        assert differing == {"model", "source"}


def test_the_built_in_model_plans_as_its_pack_does(capsys: pytest.CaptureFixture[str]) -> None:
    from strata.engine.models import open_random
    from strata.engine.plan_subject import find_subject

    by_shape = planned(capsys, "built-in-random", "--ram-gib", "8")
    opened = open_random()
    opened.close()
    by_pack = planned(capsys, str(opened.reader.folder), "--ram-gib", "8")
    assert by_pack["ram"] == by_shape["ram"]
    assert find_subject(str(opened.reader.folder), "bf16").matrices == find_subject("built-in-random", "bf16").matrices


def test_without_a_measurement_no_speed_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    assert planned(capsys, "qwen3-30b", "--ram-gib", "64")["expected"] is None
    assert main(["plan", "qwen3-30b", "--ram-gib", "64"]) == 0
    assert "not measured yet" in capsys.readouterr().out


def test_an_option_that_the_plan_does_not_follow_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "qwen3-30b", "--ram-gib", "64", "--vram-reserve-mib", "100")
    assert list(plan["refused"]) == ["vram_reserve_mib"]
    assert planned(capsys, "qwen3-30b", "--ram-gib", "64")["refused"] == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing-here"], "qwen3-30b, flash-next, qwen3-235b"),
        (["qwen3-30b", "--device", "cuda:7"], "--vram-gib"),
        (["qwen3-30b", "--device", "cuda", "--vram-gib", "1", "--ram-gib", "64"], "it takes --vram-gib"),
        (["qwen3-30b", "--ram-gib", "2"], "--max-context"),
        (["qwen3-30b", "--max-context", "100000"], "--max-context 40960"),
    ],
)
def test_what_does_not_fit_ends_in_one_line_and_a_way_out(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert said in "\n".join(err)


def test_a_refusal_as_json_has_the_bytes_that_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b", "--ram-gib", "2", "--json"]) == 2
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["short_bytes"] > 0
    assert refusal["hint"]


def test_a_file_that_is_no_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for text, said in (("[1]", "list"), ("{", "config.json"), ("{}", "architectures")):
        (tmp_path / "config.json").write_text(text)
        assert main(["plan", str(tmp_path / "config.json")]) == 2
        assert said in capsys.readouterr().err


def test_show_config_is_about_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b", "--ram-gib", "64", "--resident-experts", "--show-config"]) == 0
    assert "RAM mode resident: asked for" in capsys.readouterr().out
