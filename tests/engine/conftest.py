"""Checkpoints written by transformers, and engines over packs of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.engine.engine import Engine
from strata.engine.runtime import Runtime
from strata.models import find
from strata.text.byte_tokenizer import byte_tokenizer
from tests.models.oracle import Pair, tiny_qwen3, tiny_qwen4

VOCABULARY = 272
END = {"eos_token_id": [258, 256]}
TINY = {
    "qwen3": lambda: tiny_qwen3(vocab_size=VOCABULARY, **END, max_position_embeddings=1024),
    "qwen4": lambda: tiny_qwen4(vocab_size=VOCABULARY, **END, max_position_embeddings=1024),
}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(home))


@pytest.fixture(scope="session", params=sorted(TINY))
def pair(request: pytest.FixtureRequest) -> Pair:
    return TINY[request.param]()


@pytest.fixture(scope="session")
def checkpoint(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's own files, with a byte tokenizer beside them."""
    folder = tmp_path_factory.mktemp("checkpoint") / type(pair.oracle).__name__
    pair.oracle.save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def packs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``exact``: BF16 experts, everything else FP32. ``default``: what ``strata pack`` makes. ``experts``: its experts,
    everything else FP32."""
    folder = tmp_path_factory.mktemp("packs")
    exact = PackOptions(experts="bf16", dense="f32", hyper="f32")
    return {
        "exact": pack_checkpoint(checkpoint, folder / "exact", find, exact),
        "default": pack_checkpoint(checkpoint, folder / "default", find),
        "experts": pack_checkpoint(checkpoint, folder / "experts", find, PackOptions(dense="f32", hyper="f32")),
    }


def load(path: Path, **options: Any) -> Engine:
    return Engine.load(path, **{"max_context": 512, "ram_gib": 6, **options})


@pytest.fixture
def engine(packs: dict[str, Path]) -> Iterator[Engine]:
    with load(packs["default"]) as engine:
        yield engine


@pytest.fixture
def runtime(packs: dict[str, Path]) -> Iterator[Runtime]:
    engine = load(packs["default"])
    with engine:
        yield engine._runtime
