"""A carried folder keeps to its size and gives every file back to the byte."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

import carry
from carry import TOKEN_FILES, WEIGHT_FILES
from data import load_code


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    tokens, weights = tmp_path / "tokens", tmp_path / "weights"
    tokens.mkdir()
    weights.mkdir()
    rng = np.random.default_rng(1)
    for name in TOKEN_FILES:
        (tokens / name).write_bytes(rng.bytes(500))
    for half in range(2):
        ids = rng.integers(0, 8192, 40_000).astype("<u2")
        (tokens / f"code-{half}.u16.xz").write_bytes(lzma.compress(ids.tobytes()))
    for name in WEIGHT_FILES:
        (weights / name).write_text(json.dumps(name))
    for number, size in enumerate((4001, 30_000), 1):
        (weights / f"model-{number:05}-of-00002.safetensors").write_bytes(rng.bytes(size))
    return tokens, weights


def test_a_folder_of_bounded_size_gives_weights_and_the_first_code_back(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "LEAST_CODE", 100)
    tokens, weights = made
    count = carry.pack(tokens, weights, tmp_path / "carried", 120_000)
    size = sum(path.stat().st_size for path in (tmp_path / "carried").rglob("*") if path.is_file())
    assert 100_000 < size <= 120_000
    carry.unpack(tmp_path / "carried", tmp_path / "back")
    for path in weights.iterdir():
        assert (tmp_path / "back" / "weights" / path.name).read_bytes() == path.read_bytes()
    assert np.array_equal(load_code(tmp_path / "back" / "tokens"), load_code(tokens)[:count])
    assert {p.name for p in (tmp_path / "back" / "tokens").iterdir()} == {*TOKEN_FILES, "code-0.u16.xz"}


def test_too_small_a_folder_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--bytes"):
        carry.pack(*made, tmp_path / "carried", 50_000)
