"""Rounds on a card against transformers in FP32 on the same card, and the same test by emulation on the CPU.

Imports the oracle, so it is apart from test_device_card.py, which a machine with nothing but the package can run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.models import find
from strata.text.byte_tokenizer import byte_tokenizer
from tests.engine.conftest import TINY, VOCABULARY
from tests.engine.emulated_device import device_runtime
from tests.engine.runtimes import open_runtime
from tests.models.oracle import Pair, defined_ties, sample_ids, worst

BF16_STEP = 2.0**-8


@pytest.fixture(scope="module", params=sorted(TINY))
def rounded(request: pytest.FixtureRequest) -> Pair:
    """A transformers model whose weights are BF16 numbers, so that a pack of BF16 experts has the same."""
    pair: Pair = TINY[request.param]()
    with torch.no_grad():
        for weight in pair.oracle.parameters():
            weight.copy_(weight.bfloat16().float())
    return pair


@pytest.fixture(scope="module")
def pack(rounded: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounded")
    rounded.oracle.save_pretrained(folder / "checkpoint")
    byte_tokenizer(folder / "checkpoint")
    options = PackOptions(experts="bf16", dense="f32", hyper="f32")
    return pack_checkpoint(folder / "checkpoint", folder / "pack", find, options)


def rounds_on(device: str, pack: Path) -> AbstractContextManager[Runtime]:
    if device == "cpu":
        return device_runtime(pack, expert_cache=5)
    return open_runtime(pack, device="cuda", max_context=512, expert_cache=5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_are_those_of_transformers_in_fp32_on_the_same_device(rounded: Pair, pack: Path, device: str) -> None:
    """A prompt in windows past the sparse index's budget, then rounds of one and of several rows; experts in VRAM and
    outside. The state is BF16 as by default: its step is the tolerance."""
    ids = sample_ids(45, 3, VOCABULARY - 30)
    assert not torch.backends.cuda.matmul.allow_tf32, "the oracle computes in FP32"
    oracle = rounded.oracle.to(device)
    try:
        with torch.no_grad(), defined_ties():
            given = torch.tensor([ids], device=device)
            expected = oracle(input_ids=given, use_cache=False).logits[0].float().cpu()
    finally:
        rounded.oracle.to("cpu")
    with rounds_on(device, pack) as runtime:
        session, found = Session(runtime), {}
        found[29] = session.read_prompt(ids[:30])
        at = 30
        for rows in (1, 3, 8, 1, 2):
            for row, logits in enumerate(session.round(ids[at : at + rows])):
                found[at + row] = logits.clone()
            session.commit(rows)
            at += rows
    assert at == len(ids)
    for position, logits in found.items():
        assert worst(logits, expected[position]) < BF16_STEP, position
        assert int(logits.argmax()) == int(expected[position].argmax()), position
