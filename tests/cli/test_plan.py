"""``strata plan`` as a user types it: shapes, a bare config.json, a folder, and what does not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from strata.cli.app import main
from strata.engine import calibration
from strata.engine.rates import LayerCosts, rates_key, write_rates
from strata.kernels.cpu import pool
from strata.models.known_shapes import KNOWN_SHAPES
from strata.paths import find_home
from tests.engine.test_forecast import RATES

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


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which this machine's rates are kept, with rates that were never measured."""
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_measure", lambda *_: RATES)
    home = find_home()
    return write_rates(home.make(home.calibration), rates_key(pool.default_threads()), RATES)


def test_what_was_measured_is_forecast_and_what_is_lacking_is_named(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "qwen3-30b", "--ram-gib", "64"]
    assert main(asked) == 0
    assert "expected speed: prompt" in capsys.readouterr().out
    assert main([*asked, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "not measured yet with 1 thread; 'strata plan --threads 1 --measure'" in out
    rates = dataclasses.replace(RATES, layers={"qwen4_exp": LayerCosts(0, 0, 0, 0)})
    write_rates(kept.parent, rates_key(pool.default_threads()), rates)
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "the layers of qwen3_moe were not measured yet; 'strata plan qwen3-30b --measure' adds them" in out
    assert planned(capsys, *asked[1:])["expected"] is None


def test_a_damaged_file_of_rates_is_named_once_and_written_anew(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = kept.read_text()
    kept.write_text(whole.replace('"stager_threads": 4', '"stager_threads": 1000000000'))
    asked = ["plan", "qwen3-30b", "--ram-gib", "64"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert "not measured yet" in out
    assert "1,000,000,000" not in out
    assert err.count(kept.name) == err.count("rates.bandwidths.stager_threads") == 1
    assert main([*asked, "--measure"]) == 0
    assert kept.read_text() == whole


def test_a_forecast_that_cannot_be_kept_is_printed(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept.unlink()
    kept.mkdir()
    assert main(["plan", "qwen3-30b", "--ram-gib", "64", "--measure"]) == 0
    out, err = capsys.readouterr()
    assert "expected speed: prompt" in out
    assert f"{kept} cannot be written: Is a directory; remove the folder {kept.name} and measure again" in err
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_home_that_cannot_be_written_is_refused_before_measuring(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured in vain"))
    monkeypatch.setenv("STRATA_HOME", str(kept))
    assert main(["plan", "qwen3-30b", "--ram-gib", "64", "--measure"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "set STRATA_HOME to a folder that you can write" in err[1]


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
