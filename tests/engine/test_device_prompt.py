"""Prompts in chunks on an emulated card: bits that depend on nothing but the rows, near the CPU's and the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.engine import device_prompt, device_rounds
from strata.engine.session import Session
from tests.engine.conftest import VOCABULARY, load
from tests.engine.emulated_device import device_runtime
from tests.models.oracle import Pair, defined_ties, sample_ids


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 32 rows, and any prompt of more than 8 rows in chunks."""
    monkeypatch.setattr(device_prompt, "FRAME_ROWS", 32)
    monkeypatch.setattr(device_rounds, "SHORT_ROWS", 8)


def prompt(count: int, seed: int = 3) -> list[int]:
    return sample_ids(count, seed, VOCABULARY - 30)


def transcript(path: Path, ids: list[int], rounds: int = 3, **options: Any) -> torch.Tensor:
    with device_runtime(path, **options) as runtime:
        session = Session(runtime)
        found = [session.read_prompt(ids)]
        for _ in range(rounds):
            found.append(session.round([int(found[-1].argmax())])[0])
            session.commit(1, decoded=True)
        return torch.stack(found)


def test_logits_are_near_those_of_transformers(pair: Pair, packs: dict[str, Path]) -> None:
    ids = prompt(75)
    with torch.no_grad(), defined_ties():
        expected = pair.oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    found = transcript(packs["exact"], ids, 0, expert_cache=5)[0]
    assert float((found - expected).norm() / expected.norm()) < 0.02
