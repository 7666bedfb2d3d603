"""``strata bench decode|prompt`` on the built-in random model, beside a forecast of known rates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strata.cli.app import main
from strata.engine import speed_bench
from strata.engine.rates import LayerCosts, Rates
from tests.engine.test_forecast import BANDWIDTHS, KERNELS

SIZES = ("--prompt", "16", "--decode", "4", "--runs", "2")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rates that make a layer of a round take a second; lists whose machine was measured."""
    asked: list[str] = []
    rates = Rates(BANDWIDTHS, KERNELS, {"qwen3_moe": LayerCosts(1.0, 0, 0, 0)}, None)

    def measure(requested: Any) -> Rates:
        asked.append(requested.model)
        return rates

    monkeypatch.setattr(speed_bench, "measure_rates", measure)
    return asked


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any]]:
    assert main(["bench", *words, *SIZES]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(("kind", "name"), [("decode", "decode_plain"), ("prompt", "prompt_16")])
def test_the_rate_and_its_forecast(
    kind: str, name: str, capsys: pytest.CaptureFixture[str], measured: list[str]
) -> None:
    out, record = run(capsys, kind, "built-in-random")
    figures = record["figures"]
    assert figures[name]["runs"] == 2
    ratio = figures[f"{name}_over_predicted"]["value"]
    assert ratio == pytest.approx(figures[name]["value"] / figures[f"{name}_predicted"]["value"])
    assert "predicted:" in out
    assert record["machine"]["ram_mode"] == "arena"
    assert measured == ["built-in-random"], "a machine that was not measured yet is"
    if kind == "decode":
        assert figures[f"{name}_predicted"]["value"] == pytest.approx(1 / 6, rel=0.01)


def test_placements_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(capsys, "decode", "built-in-random", "--mmap-experts")
    assert record["machine"]["ram_mode"] == "mapped"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decode", "no-such-model"], "no-such-model"),
        (["speed"], "kernels, cache, decode, prompt"),
        (["decode", "built-in-random", "--max-context", "4"], "--decode"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words, *SIZES]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("strata: error", "  try"))]
    assert said in "\n".join(err)
