"""The shipped pack: its size, its text, its goldens, and transformers on what ``strata export`` writes of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen4ExpForConditionalGeneration

from strata.checkpoint.export import export_checkpoint
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.cli.demo import DEFAULT_PROMPT
from strata.config_sources import resolve_here
from strata.engine.engine import Engine
from strata.engine.models import open_model, shipped_pack
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.experts.profile import read_profile
from strata.models import find
from tests.models.oracle import defined_ties, worst

ROOT = Path(__file__).parents[2]
ORACLE_TOKENS = 640  # past the index budget of 512
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256}


@pytest.fixture(scope="module")
def pack() -> Path:
    found = shipped_pack()
    assert found is not None, "src/strata/data/small is not there"
    return found


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((Path(__file__).parent / "small_golden.json").read_text())
    return table


def open_runtime(pack: Path) -> Iterator[Runtime]:
    opened = open_model(str(pack))
    runtime = Runtime.open(opened, resolve_here(arguments={"ram_gib": 6, "device": "cpu"}))
    yield runtime
    runtime.close()
    opened.close()


@pytest.fixture(scope="module")
def runtime(pack: Path) -> Iterator[Runtime]:
    yield from open_runtime(pack)


def all_logits(runtime: Runtime, ids: list[int]) -> torch.Tensor:
    """Logits of every row, read in chunks as a prompt is."""
    state, found = runtime.model.new_state(len(ids)), []
    for start in range(0, len(ids), 512):
        part = ids[start : start + 512]
        logits = runtime.model.forward(runtime.ops, part, state, runtime.experts, "all", certain=True)
        assert logits is not None
        found.append(logits)
        state.commit(len(part))
    return torch.cat(found)


def nats(logits: torch.Tensor, ids: list[int]) -> float:
    return float(F.cross_entropy(logits.double(), torch.tensor(ids), reduction="sum"))


def test_the_pack_is_small_and_whole(pack: Path) -> None:
    sizes = [path.stat().st_size for path in pack.iterdir()]
    assert sum(sizes) <= 24_000_000
    assert max(sizes) <= 15_000_000
    with PackReader(pack) as reader:
        assert reader.check() > 20_000_000
        assert "mtp" not in reader.manifest.absent_groups
        assert reader.manifest.experts is not None
        assert reader.manifest.experts.format == "nvfp4"


def test_no_name_given_is_this_model() -> None:
    with Engine.load(ram_gib=6) as engine:
        assert engine.name == "small"
        assert not engine.model.random
    with Engine.load("built-in-random", ram_gib=6) as engine:
        assert engine.model.random


def test_bits_per_byte_are_the_stored_ones(runtime: Runtime, golden: dict[str, Any]) -> None:
    found = sum(nats(all_logits(runtime, window[:-1]), window[1:]) for window in golden["windows"])
    assert found / math.log(2) / golden["text_bytes"] == pytest.approx(golden["bits_per_byte"], rel=0.005)


def test_greedy_tokens_and_logits_of_held_out_prompts(runtime: Runtime, golden: dict[str, Any]) -> None:
    assert len(golden["prompts"]) == 10
    for prompt in golden["prompts"]:
        session = Session(runtime)
        logits = session.read_prompt(prompt["ids"])
        ids, values = zip(*prompt["largest"], strict=True)
        assert logits[list(ids)].tolist() == pytest.approx(values, rel=2e-3, abs=2e-3), prompt["text"]
        found = [int(logits.numpy().argmax())]
        while len(found) < len(prompt["greedy"]):
            logits = session.round([found[-1]])[0]
            session.commit(1, decoded=True)
            found.append(int(logits.numpy().argmax()))
        assert found == prompt["greedy"], prompt["text"]


def test_the_demos_prompt_is_held_out(golden: dict[str, Any]) -> None:
    assert DEFAULT_PROMPT in [prompt["text"] + "\n" for prompt in golden["prompts"]]


def test_the_profile_counts_every_pick(pack: Path) -> None:
    with PackReader(pack) as reader:
        profile = read_profile(pack, reader.digest, len(reader.expert_layers), reader.num_experts)
        top_k = reader.config["text_config"]["num_experts_per_tok"]
    assert profile is not None
    assert profile.rows >= 10_000
    assert profile.picks.sum(1).tolist() == [profile.rows * top_k] * len(profile.picks)
    assert np.all(profile.picks > 0), "an expert that text never picks is dead weight"


def test_the_card_says_what_was_measured(pack: Path) -> None:
    card = (pack / "MODEL_CARD.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "results" / "cpu2" / "small.json").read_text())
    corpus = json.loads((ROOT / "tools" / "train" / "corpus.json").read_text())
    assert "a small completion model for tests and the demo; it knows nothing" in " ".join(card.lower().split())
    assert "Apache-2.0" in card
    for name in ("bits_per_byte_bf16", "bits_per_byte_q8_0", "bits_per_byte_nvfp4", "bits_per_byte_shipped"):
        assert f"| {record['figures'][name]['value']:.4f} |" in card, name
    for digest in record["machine"]["checkpoint_sha256"].values():
        assert re.fullmatch(r"[0-9a-f]{64}", digest)
        assert digest in card
    for one in corpus["sources"]:
        assert f"| {one['name']} | {one['version']} | {one['licence']} | {one['bytes']:,} |" in card


@pytest.fixture(scope="module")
def exported(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(pack, tmp_path_factory.mktemp("small") / "exported")


@pytest.fixture(scope="module")
def oracle_logits(exported: Path, golden: dict[str, Any]) -> torch.Tensor:
    """transformers, FP32, on the exported weights. The vision tower that the class insists on is a dummy."""
    path = exported / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vision_config": VISION}))
    model = Qwen4ExpForConditionalGeneration.from_pretrained(exported, dtype=torch.float32).eval()
    path.write_text(json.dumps(config))
    with torch.no_grad(), defined_ties():
        ids = torch.tensor([golden["windows"][0][:ORACLE_TOKENS]])
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@pytest.mark.slow
def test_transformers_agrees_on_the_exported_weights(
    exported: Path, oracle_logits: torch.Tensor, golden: dict[str, Any], tmp_path: Path
) -> None:
    """The same weights on both sides, past the index budget: every logit."""
    exact = PackOptions(experts="bf16", dense="f32", hyper="f32")
    again = pack_checkpoint(exported, tmp_path / "again", find, exact)
    for runtime in open_runtime(again):
        logits = all_logits(runtime, golden["windows"][0][:ORACLE_TOKENS])
    assert worst(logits, oracle_logits) <= 1e-3


@pytest.mark.slow
def test_transformers_reads_the_text_as_the_pack_does(
    runtime: Runtime, oracle_logits: torch.Tensor, golden: dict[str, Any]
) -> None:
    """8-bit activations and one more rounding of the weights to BF16 lie between the two."""
    window = golden["windows"][0]
    ids, targets = window[:ORACLE_TOKENS], window[1 : ORACLE_TOKENS + 1]
    logits = all_logits(runtime, ids)
    assert nats(logits, targets) == pytest.approx(nats(oracle_logits, targets), rel=0.005)
    assert float((logits.argmax(-1) == oracle_logits.argmax(-1)).double().mean()) > 0.95
