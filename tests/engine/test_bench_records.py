"""What a benchmark writes down: its whole command, its ceilings, and one line where it cannot write or be measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from strata.benchmark_record import read_kept
from strata.cli.app import main
from strata.engine import ready_probe, synthetic_bench
from strata.engine.ceilings import Ceilings, median_ceilings
from strata.engine.kept_runs import KeptRuns
from strata.engine.memory_use import MemoryUse
from strata.errors import ConfigError

COMPUTED = ["--synthetic", "tiny-hyper", "--layers", "2", "--decode", "6", "--learn", "64", "--runs", "1"]
MODEL = ["--device", "cpu", "--threads", "1", "--ram-gib", "4", "--log-level", "error"]
DECODE = ["bench", "decode", *COMPUTED, "--arm", "skewed", *MODEL]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))


def record(folder: Path) -> Any:
    (path,) = folder.rglob("*.json")
    return json.loads(path.read_text())


def test_a_record_has_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_PREFER_SLICES", "1")
    assert main([*DECODE, "--out", str(tmp_path / "out")]) == 0
    command = record(tmp_path / "out")["command"]
    assert command.startswith("STRATA_PREFER_SLICES=1 strata bench decode --synthetic tiny-hyper --layers 2 --runs 1 ")
    for words in ("--decode 6 --learn 64 --arm skewed", "--threads 1", "--ram-gib 4", "--device cpu"):
        assert words in command
    assert str(tmp_path) not in command


def test_ready_names_its_model(tmp_path: Path) -> None:
    pack = tmp_path / "My_Pack"
    assert main(["bench", "pack", *COMPUTED[:4], "--to", str(pack), *MODEL]) == 0
    assert main(["bench", "ready", str(pack), "--runs", "1", *MODEL, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "this-pc" / "ready-my-pack.json").exists()
    assert record(tmp_path / "out")["command"].startswith("strata bench ready My_Pack --runs 1 ")


def test_runs_that_were_kept_keep_their_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([40e9, 80e9])
    monkeypatch.setattr(synthetic_bench, "measure_ceilings", lambda _: Ceilings(next(rates)))
    found = []
    for _ in range(2):
        assert main([*DECODE, "--out", str(tmp_path / "out")]) == 0
        found.append(record(tmp_path / "out")["figures"]["decode_plain"])
    assert found[0] == found[1], "nothing was measured again"


def test_ceilings_of_several_runs_are_their_median() -> None:
    runs = [{"rate0": 1.0, "ram": ram, "vram": 3e12, "num_launches": 600.0} for ram in (1e9, 5e9, 2e9)]
    assert median_ceilings(runs) == Ceilings(2e9, vram=3e12, num_launches=600)
    assert median_ceilings([*runs, {"ram": 2e9}]).vram is None


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        '{"arms": {"a": [1, "x", null]}}',
        '{"arms": [1]}',
        '{"arms": {"a": {"b": 1}}}',
        '{"arms": {"a": [{"rate0": NaN}]}}',
        '{"arms": {"a": [{"rate0": 2}, {"rate0": -3}]}}',
        '{"arms": {"a": [{"rate0": 1e999}]}}',
        '{"arms": {"a": [{"rate0": 1%s}]}}' % ("0" * 400),
        "[" * 200_000,
        '{"arms": {"a": [{"other": 1}]}}',
    ],
)
def test_damaged_runs_are_measured_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptRuns(tmp_path, {"commit": "a"}, lambda run: "rate0" in run)
    kept.path.write_text(text)
    assert kept.read("a") == []
    assert f"{kept.path} is damaged (" in caplog.text
    assert kept.path.with_suffix(".damaged").read_text() == text, "nothing is lost"
    assert len(caplog.records) == 1
    kept.add("a", {"rate0": 2.0})
    assert kept.read("a") == [{"rate0": 2.0}]


@pytest.mark.parametrize("option", ["--out", "--profile"])
def test_a_file_in_the_way_is_said_before_anything_is_measured(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(synthetic_bench, "open_learned", lambda *_: pytest.fail("measured"))
    assert main([*DECODE, option, str(tmp_path / "file")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert str(tmp_path / "file") in lines[0]
    assert "cannot be written" in lines[0]


@pytest.mark.parametrize("what", ["decode", "ready"])
def test_a_damaged_record_is_said_before_anything_is_measured(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "this-pc" / "tiny-hyper-2layers-cpugib.json"
    kept.parent.mkdir()
    kept.write_text('{"figures": [1]}')
    monkeypatch.setattr(synthetic_bench, "open_learned", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(ready_probe, "probe_ready", lambda *_: pytest.fail("measured"))
    words = DECODE if what == "decode" else ["bench", "ready", *COMPUTED[:4], *MODEL]
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "tiny-hyper-2layers-cpugib.json is no benchmark record" in capsys.readouterr().err
    assert kept.read_text() == '{"figures": [1]}'


FIGURE = '{"value": 1, "unit": "s", "runs": 2}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is no table"),
        ("null", "it is no table"),
        ('{"commit": "a", "when": "b", "machine": {}}', "figures is missing"),
        ('{"commit": 1, "when": "b", "machine": {}, "figures": {}}', "commit is of the wrong type"),
        ('{"commit": "a", "when": "b", "machine": {}, "figures": {"zz": 1}}', "figure zz has no unit"),
        (FIGURE.replace("1,", "NaN,"), "NaN is no number of JSON"),
        (FIGURE.replace("1,", "1e999,"), "figure zz has value inf"),
        (FIGURE.replace("1,", '"x",'), "figure zz has value 'x'"),
        (FIGURE.replace('"value": 1,', ""), "figure zz has no value"),
        (FIGURE.replace("1,", "1e300,"), "figure zz has value 1e+300"),
        (FIGURE.replace('"s"', '"/home/x/y"'), "absolute path"),
        ("[" * 200_000, "recursion"),
        (FIGURE.replace("2", "-4"), "figure zz has runs -4"),
    ],
)
def test_what_is_wrong_with_a_record_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "record.json"
    around = '{"commit": "a", "when": "b", "machine": {}, "figures": {"zz": %s}}'
    path.write_text(around % text if '"unit"' in text else text)
    with pytest.raises(ConfigError, match=re.escape(f"{path} is no benchmark record: ") + ".*" + re.escape(said)):
        read_kept(path)


def test_runs_that_cannot_be_read_are_not_overwritten(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path, {"commit": "a"})
    kept.path.mkdir()
    for call in (lambda: kept.read("a"), lambda: kept.add("a", {"rate0": 1.0})):
        with pytest.raises(ConfigError, match=re.escape(f"{kept.path} cannot be read: ")):
            call()


def test_a_record_s_command_has_nothing_of_sampling_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_TEMPERATURE", "0.7")
    assert main([*DECODE, "--out", str(tmp_path / "out")]) == 0
    command = record(tmp_path / "out")["command"]
    assert "--temperature" not in command
    assert "--log-level" not in command


def test_every_record_that_is_kept_can_be_merged_into(root: Path) -> None:
    records = [path for path in root.glob("benchmarks/results/*/*.json") if '"figures"' in path.read_text()]
    assert len(records) > 10
    for path in records:
        assert read_kept(path) is not None


def test_a_drives_rate_is_the_faster_of_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter([2e9, 3e9])
    monkeypatch.setattr(ready_probe, "measure_drive", lambda files: next(rates))
    assert main(["bench", "pack", *COMPUTED[:4], "--to", str(tmp_path / "pack"), *MODEL]) == 0
    assert main(["bench", "ready", str(tmp_path / "pack"), "--runs", "1", *MODEL]) == 0
    assert "the drive gives 3.00 GB/s" in capsys.readouterr().out


def test_an_arm_without_room_is_refused_before_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synthetic_bench, "open_learned", lambda *_: pytest.fail("measured"))
    assert main([*DECODE, "--arm", "depth"]) == 2
    assert "arm depth decodes at 131,072 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decode", "--arm", "skewed"], "--arm is for computed models"),
        (
            ["decode", "some-model", "--synthetic", "tiny-hyper"],
            "a model's name means nothing for --synthetic tiny-hyper",
        ),
        (["decode", "--synthetic", "tiny-hyper", "--prompt", "9"], "--prompt means nothing for --synthetic tiny-hyper"),
        (["ready", "--synthetic", "tiny-hyper", "--arm", "skewed"], "--arm means nothing for bench ready"),
        (["ready", "--synthetic", "tiny-hyper", "--learn", "64"], "--learn means nothing for bench ready"),
        (["prompt", "--synthetic", "tiny-hyper"], "it is for decode, ready, checkpoint, pack"),
        (["decode", "--gib", "2"], "--gib means nothing for bench decode"),
        (["decode", "--synthetic", "tiny-hyper", "--temperature", "1"], "--temperature means nothing for bench"),
        (["kernels", "--seed", "3"], "--seed means nothing for bench"),
        (["decode", "--synthetic", "tiny-hyper", "--learn", "99999999"], "less than or equal to 1048576"),
        (["decode", "--synthetic", "tiny-hyper", "--out", "x", "--machine", "../y"], "'../y' is no name of a machine"),
    ],
)
def test_what_does_not_apply_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words, *MODEL]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.parent.glob("y")), "no folder is made for it"
    assert not (tmp_path / "x").exists()


def test_a_named_error_of_the_process_that_gets_ready_is_named_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "ready", *COMPUTED[:4], "--runs", "1", "--log-level", "error"]
    assert main([*words, "--device", "cpu", "--ram-gib", "0.000001"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert "the process that was to get ready" not in lines[0]
    assert lines[1].startswith("  try: ")


def test_a_rate_of_page_locking_is_a_cards() -> None:
    use = MemoryUse(None, 1 << 30, 1 << 30, 1 << 30, 1 << 30, 0.001, 1)
    assert use.lock_rate == 0
    assert use.lines()[-1] == "page-locked 1.00 GiB, path 1"
