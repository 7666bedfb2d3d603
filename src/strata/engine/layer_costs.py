"""Measures what a layer costs beside its arithmetic: rounds and prompts of a model that has next to none.

Lives in ``engine`` because it runs a model as any other, under three placements; what it finds are the "launches" of a
forecast. The model is random and made for the measurement alone.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.checkpoint.random_model import write_random_pack
from strata.config import Requested
from strata.engine.models import OpenModel, open_model
from strata.engine.rates import LayerCosts
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.models import find
from strata.models.known_shapes import PROBE_SHAPES
from strata.option_values import Auto, Prefill
from strata.stats import steady_mean
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer_files import tokenizer_files

__all__ = ["measure_layers"]

PROMPT_ROWS = 512  # a chunk of the CPU
PROMPTS = 2  # of a look; the last counts, the first touches memory for the first time
CHUNK = Prefill(PROMPT_ROWS, is_auto=False)
ROUNDS, SLICES = 20, 3  # rounds between two looks at another placement, and how often each is looked at
PLACEMENTS: dict[str, dict[str, Any]] = {
    "memory": {},
    "one pick": {},
    "ring": {"vram_gib": 1.0, "expert_cache": 64, "adapt_every": 0},
}


def measure_layers(family: str, threads: int | Auto) -> LayerCosts:
    """Medians of a few looks at each placement, taken in turns so that a busy machine disturbs all of them alike."""
    shape = PROBE_SHAPES[family]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as owned:
        owned.enter_context(_quietly())
        byte_tokenizer(folder)
        files = tuple(tokenizer_files(Path(folder)))
        models = []
        for name, changes in (("all", {}), ("one", {"num_experts_per_tok": 1})):
            pack = write_random_pack(Path(folder) / name, {**shape, **changes}, find, seed=1, tokenizer_files=files)
            models.append(open_model(str(pack)))
            owned.callback(models[-1].close)
        looks = _look(
            models[0],
            models[1],
            Requested(device="cpu", threads=threads, max_context=1024, prefill=CHUNK, resident_headroom_gib=0.0),
        )
    return _costs(looks, models[0].config.num_layers, models[0].config.top_k)


@dataclass
class _Looks:
    """Seconds of the looks at one placement, and how many experts a prompt of the last moved."""

    prompts: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    loads: int = 0


def _look(model: OpenModel, one_pick: OpenModel, requested: Requested) -> dict[str, _Looks]:
    looks = {name: _Looks() for name in PLACEMENTS}
    for _ in range(SLICES):
        for name, look in looks.items():
            asked = dataclasses.replace(requested, **PLACEMENTS[name])
            runtime = Runtime.open(one_pick if name == "one pick" else model, asked)
            try:
                prompt, each = _play(runtime)
                look.loads = runtime.statistics().experts.ring_loads // PROMPTS
            finally:
                runtime.close()
            look.prompts.append(prompt)
            look.rounds.append(each)
    return looks


def _costs(looks: dict[str, _Looks], layers: int, top_k: int) -> LayerCosts:
    rounds = {name: statistics.median(look.rounds) / layers for name, look in looks.items()}
    prompts = {name: statistics.median(look.prompts) / layers for name, look in looks.items()}
    a_pick = max(0.0, prompts["memory"] - prompts["one pick"]) / (top_k - 1) / PROMPT_ROWS
    return LayerCosts(
        a_round=rounds["memory"],
        a_row=max(0.0, (prompts["one pick"] - rounds["one pick"]) / PROMPT_ROWS - a_pick),
        a_pick=a_pick,
        a_load=max(0.0, prompts["ring"] - prompts["memory"]) * layers / max(1, looks["ring"].loads),
    )


def _play(runtime: Runtime) -> tuple[float, float]:
    """(seconds of a prompt, mean seconds of a round)."""
    session = Session(runtime)
    ids = [(7 * at) % 251 for at in range(PROMPT_ROWS)]
    prompt = 0.0
    for _ in range(PROMPTS):
        session.reset()
        began = time.perf_counter()
        session.read_prompt(ids)
        prompt = time.perf_counter() - began
    seconds = []
    for at in range(ROUNDS):
        began = time.perf_counter()
        session.round([at])
        session.commit(1, decoded=True)
        seconds.append(time.perf_counter() - began)
    return prompt, steady_mean(seconds)


@contextmanager
def _quietly() -> Iterator[None]:
    """Nobody wants to read that a probe is ready."""
    logger = logging.getLogger("strata")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
