"""Records of measured figures: the format of the design, nothing private in it, written whole or not at all."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from strata import benchmark_record
from strata.benchmark_record import Figure, Record, measured, record_path
from strata.errors import ConfigError

MACHINE = {"cpu": "two AVX2 cores", "cores": 2, "ram_gib": 23.0}


def test_format(tmp_path: Path) -> None:
    figures = {"cpu_expert_kernel": measured([8.0, 10.0, 9.5], "GB/s", ceiling=19.0), "hit": Figure(0.5, "ratio")}
    record = Record("strata bench kernels --threads 2", MACHINE, figures, commit="abc", dirty=True, when="2026-01-01")
    path = record_path(tmp_path, "cpu2", "kernels")
    record.write(path)
    assert path == tmp_path / "cpu2" / "kernels.json"
    found = json.loads(path.read_text())
    assert found == json.loads(record.line())
    assert list(found) == ["command", "commit", "dirty", "when", "machine", "figures"]
    assert found["figures"]["cpu_expert_kernel"] == {
        "value": 9.5, "unit": "GB/s", "ceiling": 19.0, "percent": 50.0, "min": 8.0, "max": 10.0, "runs": 3
    }  # fmt: skip
    assert found["figures"]["hit"] == {"value": 0.5, "unit": "ratio", "runs": 1}
    assert [one.name for one in path.parent.iterdir()] == ["kernels.json"], "no temporary file is left"


@pytest.mark.parametrize(
    "command",
    [
        "strata bench /home/someone/model",
        "strata bench --model=/mnt/big/pack",
        "strata bench ~/pack",
        "strata bench C:\\packs\\a",
        "bench on somehost-7",
        "bench by annabel",
    ],
)
def test_private_words_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(platform, "node", lambda: "somehost-7.example")
    monkeypatch.setattr(benchmark_record, "user_name", lambda: "annabel")
    path = tmp_path / "cpu2" / "x.json"
    with pytest.raises(ConfigError, match="record"):
        Record(command, MACHINE, {}).write(path)
    with pytest.raises(ConfigError, match="record"):
        Record("bench", {"cpu": {"names": [command]}}, {}).write(path)
    assert not path.exists()


def test_ordinary_words_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "box")
    monkeypatch.setattr(benchmark_record, "user_name", lambda: "root")
    Record("strata bench ./packs/a --arm 1/2", {"unit": "GB/s", "cpu": "Xeon sandbox, rooted"}, {}).line()


def test_nan_is_no_figure() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Record("bench", MACHINE, {"x": Figure(float("nan"), "s")}).line()


def test_names_of_files(tmp_path: Path) -> None:
    for name in ("../x", "A", "", "a b"):
        with pytest.raises(ConfigError, match="is no name"):
            record_path(tmp_path, "cpu2", name)
