"""Prompts in chunks on a real card: what test_device_prompt.py proves by emulation, at full frames, with the library's
own products and attention. Imports no oracle, so that a machine with nothing but the package can run it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.engine.models import shipped_pack
from strata.engine.session import Session
from strata.errors import StrataError
from tests.engine.random_models import FAMILIES, write_random_model
from tests.engine.reference_run import ReferenceRun
from tests.engine.runtimes import open_runtime
from tests.engine.test_device_card import prompt, small

pytestmark = pytest.mark.gpu

LENGTH = 2600  # two frames, the second of them in part
CHUNKS: list[dict[str, Any]] = [{"prefill": rows} for rows in (512, 1536, 2048, 8192)]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in VRAM": {"expert_cache": 1000, "resident_experts": True},
    "no slots": {"expert_cache": 0},
    "a few slots": {"expert_cache": 20},
    "a small ring": {"expert_cache": 20, "prefill_ring": 3},
    "nothing page-locked": {"expert_cache": 20, "arena_pin_gib": "none"},
    "slices": {"expert_cache": 20, "test_complement_refuse": True, "resident_experts": True},
    "ring reserved": {"expert_cache": 20, "prefill_borrow": False},
    "mapped": {"expert_cache": 20, "mmap_experts": True},
    "file": {"expert_cache": 20, "resident_budget_gib": 0.003},
}


def transcript(ids: list[int], rounds: int = 4, **options: Any) -> torch.Tensor:
    with small("cuda", **{"max_context": 4096, "expert_cache": 20, "adapt_every": 0, **options}) as runtime:
        session = Session(runtime)
        found = [session.read_prompt(ids)]
        for _ in range(rounds):
            found.append(session.round([int(found[-1].argmax())])[0])
            session.commit(1, decoded=True)
        return torch.stack(found)


def test_neither_chunks_nor_placement_change_a_bit() -> None:
    ids = prompt(LENGTH)
    expected = transcript(ids)
    for options in (*CHUNKS, *PLACEMENTS.values()):
        assert torch.equal(transcript(ids, **options), expected), options


def test_a_conversations_prompts_and_rounds_are_as_exact_as_their_arithmetic() -> None:
    """Of several lengths, one after another, so that two begin within a frame. Measured against FP32: a prompt's rows
    are no worse than 1.5 times a BF16 run's in plain torch, rounds than 1.5 times the CPU's, whose activations are
    codes of 8 bits too. The CPU itself is no measure for prompts: it errs by 0.08 where BF16 errs by 0.05."""
    lengths, found = (700, 129, 1400), {}
    for device in ("cpu", "cuda"):
        with small(device, max_context=4096, expert_cache=20, adapt_every=0) as runtime:
            session, rows = Session(runtime), []
            for length in lengths:
                rows.append(session.read_prompt(prompt(length)))
                for token in (11, 12):
                    rows.append(session.round([token])[0].clone())
                    session.commit(1, decoded=True)
            found[device] = torch.stack(rows)
    reference = ReferenceRun(shipped_pack())
    try:
        parts = [part for length in lengths for part in (prompt(length), [11], [12])]
        exact, rounded = reference.logits(parts, rounded=False), reference.logits(parts, rounded=True)
    finally:
        reference.close()
    error = {
        name: (logits - exact).norm(dim=1) / exact.norm(dim=1) for name, logits in (*found.items(), ("bf16", rounded))
    }
    prompts = torch.arange(len(exact)) % 3 == 0
    assert float(error["cuda"][prompts].max()) < 1.5 * float(error["bf16"][prompts].max()), error
    assert float(error["cuda"][~prompts].max()) < 1.5 * float(error["cpu"][~prompts].max()), error


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_random_models_of_both_families_agree_with_the_cpu(family: str, tmp_path: Path) -> None:
    path, found = write_random_model(tmp_path, family), {}
    ids = [(31 * i + 7) % 200 for i in range(400)]
    for device in ("cpu", "cuda"):
        with open_runtime(path, device=device, max_context=512, ram_gib=2.0, vram_reserve_mib=0) as runtime:
            session = Session(runtime)
            found[device] = torch.stack([session.read_prompt(ids), session.round([5])[0]])
    error = (found["cuda"] - found["cpu"]).norm(dim=1) / found["cpu"].norm(dim=1)
    assert float(error.max()) < 5e-2, error


def test_products_of_a_frame_do_not_depend_on_the_place_of_a_row() -> None:
    """More than is needed: a row stands at one place of its frame in every chunk."""
    from strata.kernels.cuda.prompt.calls import CudaCalls
    from strata.kernels.cuda.prompt.frame import FRAME_ROWS

    calls = CudaCalls()
    for out, inner in ((10240, 2560), (320, 10240), (4, 10240), (512, 2560), (1, 2560)):
        x = torch.randn(FRAME_ROWS, inner, device="cuda").bfloat16()
        w = torch.randn(out, inner, device="cuda").bfloat16()
        y = calls.product(x, w)
        assert y.dtype == torch.float32
        assert torch.equal(y, calls.product(x, w))
        exact = x[:64].double() @ w.double().T
        assert float((y[:64] - exact).norm() / exact.norm()) < 1e-5


def test_what_is_taken_stays_within_the_plan() -> None:
    with small("cuda", vram_gib=2.0, vram_reserve_mib=256, max_context=4096, expert_cache=20) as runtime:
        Session(runtime).read_prompt(prompt(LENGTH))
        card = runtime.memory_use().card
        assert card is not None
        assert card.most <= card.planned + (256 << 20)
        assert card.most <= card.cap == 2 << 30


def test_a_failed_prompt_leaves_the_next_one_right() -> None:
    from strata.engine.cancellation import Cancellation, Cancelled

    ids = prompt(LENGTH)
    with small("cuda", max_context=4096, expert_cache=20, adapt_every=0) as runtime:
        session = Session(runtime)
        expected = session.read_prompt(ids)
        session.reset()
        cancellation = Cancellation()
        cancellation.cancel()  # seen at the first layer's experts, with copies under way
        with pytest.raises(Cancelled):
            session.read_prompt(ids, cancellation=cancellation)
        with pytest.raises(StrataError):
            session.read_prompt(prompt(5000))
        session.reset()
        assert torch.equal(session.read_prompt(ids), expected)


def test_two_processes_agree(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    program = (
        "from tests.engine.test_device_prompt_card import *\n"
        "print(hashlib.sha256(transcript(prompt(LENGTH)).numpy().tobytes()).hexdigest())\n"
    )
    hashes = set()
    for name in ("one", "two"):
        environment = os.environ | {"STRATA_HOME": str(tmp_path / name)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        hashes.add(done.stdout.strip().splitlines()[-1])
    assert hashes == {hashlib.sha256(transcript(prompt(LENGTH)).numpy().tobytes()).hexdigest()}
