"""The built-in model's rounds on a real card: what test_device_rounds.py proves by emulation, and its bits per byte.

Run with `make test-gpu`. Imports no oracle, so that a machine with nothing but the package can run it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from strata.engine.device_rounds import RoundGivenUp
from strata.engine.models import shipped_pack
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from tests.engine.runtimes import open_runtime

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "data" / "small_golden.json"
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in VRAM": {"expert_cache": 1000, "resident_experts": True},
    "CPU only": {"expert_cache": 0},
    "a few slots": {"expert_cache": 20, "adapt_every": 0},
    "link": {"expert_cache": 20, "adapt_every": 0, "pcie_frac": 1.0},
    "half the link, slices": {"expert_cache": 20, "adapt_every": 0, "pcie_frac": 0.5, "test_complement_refuse": True},
    "a swap every round": {"expert_cache": 30, "resident_experts": True, "adapt_every": 1, "adapt_swaps": 2},
    "mapped": {"expert_cache": 20, "adapt_every": 0, "mmap_experts": True},
    "file": {"expert_cache": 20, "adapt_every": 0, "resident_budget_gib": 0.003},
}


def small(device: str, **options: Any) -> AbstractContextManager[Runtime]:
    return open_runtime(shipped_pack(), **{"device": device, "max_context": 1024, **options})


def prompt(count: int) -> list[int]:
    return [(7919 * i + 13) % 7000 + 5 for i in range(count)]


def transcript(runtime: Runtime, ids: list[int], rounds: int = 12) -> torch.Tensor:
    session = Session(runtime)
    found = [session.read_prompt(ids)]
    for _ in range(rounds):
        found.append(session.round([int(found[-1].argmax())])[0])
        session.commit(1, decoded=True)
    return torch.stack(found)


def test_a_closed_runtime_leaves_nothing_on_the_card() -> None:
    """Though it and its session are still held: the next model is planned over what is free."""
    before, kept = torch.cuda.memory_allocated(), []
    for _ in range(2):
        with small("cuda", expert_cache=20) as runtime:
            kept.append((runtime, Session(runtime)))
            kept[-1][1].read_prompt(prompt(9))
            assert torch.cuda.memory_allocated() > before
        assert torch.cuda.memory_allocated() <= before


def test_every_placement_gives_the_same_bits_near_the_cpus() -> None:
    ids, first = prompt(61), None
    with small("cpu") as runtime:
        expected = transcript(runtime, ids)
    for name, options in PLACEMENTS.items():
        with small("cuda", **options) as runtime:
            found = transcript(runtime, ids)
        first = found if first is None else first
        assert torch.equal(found, first), name
    assert first is not None
    assert float(((first - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 2e-2


def test_windows_and_rejected_rows_leave_no_trace() -> None:
    ids = prompt(30)
    with small("cuda", expert_cache=20, adapt_every=0) as runtime:
        session, rows = Session(runtime), []
        for token in ids:
            rows.append(session.round([token])[0])
            session.commit(1)
        expected = torch.stack(rows)
        assert torch.equal(Session(runtime).read_prompt(ids), expected[-1])
        session, at = Session(runtime), 0
        for size, accepted in ((3, 3), (8, 2), (5, 5), (1, 1), (8, 8), (4, 0), (7, 6), (5, 5)):
            assert torch.equal(session.round(ids[at : at + size]), expected[at : at + size])
            session.commit(accepted)
            at += accepted


@pytest.mark.parametrize("exchange", [1, 4, 8])
@pytest.mark.parametrize("kind", ["sleep", "die", "abort"])
def test_a_round_without_an_answer_ends_and_the_repeated_one_is_right(kind: str, exchange: int) -> None:
    ids = prompt(12)
    with small("cuda", expert_cache=0) as runtime:
        expected = transcript(runtime, ids, 1)
        session = Session(runtime)
        token = int(session.read_prompt(ids).argmax())
        assert runtime.rounds is not None
        runtime.rounds.dispatch.conductor.plan_fault(kind, exchange, 3000)  # type: ignore[arg-type]
        with pytest.raises(RoundGivenUp):
            session.round([token])
        assert torch.equal(session.round([token])[0], expected[1])


@pytest.mark.parametrize("options", [{}, {"expert_cache": 20, "pcie_frac": 0.5}])
def test_what_is_taken_stays_within_plan_and_cap(options: dict[str, Any]) -> None:
    """torch's allocator rounds up what the plan counts; that is the reserve's to bear, and the cap holds it all."""
    with small("cuda", vram_gib=0.5, vram_reserve_mib=128, **options) as runtime:
        transcript(runtime, prompt(61))
        rounds, card = runtime.rounds, runtime.memory_use().card
        assert rounds is not None
        assert card is not None
        assert rounds.buffer_bytes <= runtime.plan.vram["round buffers"]
        assert card.most <= card.planned + (128 << 20)
        assert card.most <= card.cap == 1 << 29


def test_bits_per_byte_are_the_cpus_within_half_a_percent() -> None:
    golden = json.loads(GOLDEN.read_text())
    nats = 0.0
    with small("cuda", max_context=2048) as runtime:
        for window in golden["windows"]:
            session, found = Session(runtime), []
            for first in range(0, len(window) - 1, 8):
                part = window[first : min(first + 8, len(window) - 1)]
                found.append(session.round(part))
                session.commit(len(part))
            nats += float(F.cross_entropy(torch.cat(found).double(), torch.tensor(window[1:]), reduction="sum"))
    assert nats / math.log(2) / golden["text_bytes"] == pytest.approx(golden["bits_per_byte"], rel=0.005)


def test_two_processes_with_cold_caches_agree(tmp_path: Path) -> None:
    """Kernels compiled anew in each, and another stream that loads the card meanwhile in the second. It waits for its
    own stream alone: waiting for the whole card is not allowed in a process while a round is recorded."""
    program = (
        "import hashlib, sys, threading, torch\n"
        "from tests.engine.test_device_card import prompt, small, transcript\n"
        "def load():\n"
        "    own = torch.cuda.Stream()\n"
        "    with torch.cuda.stream(own):\n"
        "        x = torch.randn(4096, 4096, device='cuda')\n"
        "        while not ended.is_set(): x = torch.nn.functional.normalize(x @ x); own.synchronize()\n"
        "ended = threading.Event()\n"
        "loading = threading.Thread(target=load)\n"
        "if sys.argv[1] == 'busy': loading.start()\n"
        "try:\n"
        "    with small('cuda', expert_cache=20, adapt_every=0, pcie_frac=0.5) as runtime:\n"
        "        found = transcript(runtime, prompt(40), 40)\n"
        "finally:\n"
        "    ended.set()\n"
        "    if sys.argv[1] == 'busy': loading.join()\n"
        "print(hashlib.sha256(found.numpy().tobytes()).hexdigest())\n"
    )
    hashes = []
    for kind in ("quiet", "busy"):
        environment = os.environ | {"STRATA_HOME": str(tmp_path / kind)}
        done = subprocess.run(
            [sys.executable, "-c", program, kind],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, (kind, done.stderr[-2000:])
        hashes.append(done.stdout.strip().splitlines()[-1])
    assert hashes[0] == hashes[1]
