"""The mean of two checkpoints is computed in FP32, rounded once, and is a checkpoint that loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.train.small_sizes import SMALL

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

from average import average
from checkpoint import export, import_weights, read_tensors
from model import Config, TrainModel


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for seed, name in enumerate(("first", "second")):
        model = TrainModel(Config(**SMALL))
        model.initialise(seed)
        export(model, tmp_path / name)
    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    (tmp_path / "first" / "figures.json").write_text("{}")
    return tmp_path / "first", tmp_path / "second"


def test_every_weight_is_the_mean_rounded_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "mean"
    average(*pair, 0.25, out)
    first, second = (read_tensors(folder) for folder in pair)
    found = read_tensors(out)
    assert found.keys() == first.keys()
    for name, tensor in found.items():
        exact = 0.75 * first[name].double() + 0.25 * second[name].double()
        assert tensor.dtype == torch.bfloat16
        # the nearest BF16 value is within half a unit of its eight bits; a second rounding would add another half
        assert bool(((tensor.double() - exact).abs() <= exact.abs() * 2**-8 * 1.0001 + 1e-30).all()), name
    assert not torch.equal(found["lm_head.weight"], first["lm_head.weight"])
    assert {path.name for path in out.iterdir()} == {path.name for path in pair[0].iterdir()} - {"figures.json"}
    model = TrainModel(Config(**SMALL))
    import_weights(model, out)
    assert torch.equal(model.lm_head.weight.detach(), found["lm_head.weight"].float())


def test_the_mean_says_of_what_it_is(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A part that goes on from it has both parts, and the share, among those before it."""
    (pair[1] / "figures.json").write_text('{"step": 7, "before": {"step": 3}}')
    average(*pair, 0.25, tmp_path / "mean")
    found = json.loads((tmp_path / "mean" / "figures.json").read_text())
    assert found == {"step": 7, "before": {"step": 3}, "mean_with_before": 0.25}


def test_what_has_no_mean_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = pair
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(SystemExit, match="between 0 and 1"):
            average(first, second, share, tmp_path / "mean")
    with pytest.raises(SystemExit, match="other than"):
        average(first, second, 0.5, second)
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}))
    with pytest.raises(SystemExit, match="one architecture"):
        average(first, second, 0.5, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
