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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from strata.checkpoint.random_model import write_random_pack
from strata.config import Requested
from strata.engine.models import OpenModel, open_model
from strata.engine.rates import LayerCosts
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.models import find
from strata.models.known_shapes import PROBE_SHAPES
from strata.option_values import Prefill
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer_files import tokenizer_files

__all__ = ["measure_layers"]

PROMPT_ROWS = 512  # a chunk of the CPU
ROUNDS, SLICES = 12, 4  # rounds between two looks at another placement, and how often each is looked at
PLACEMENTS: Mapping[str, Mapping[str, object]] = {
    "memory": {},
    "file": {"resident_budget_gib": 1e-6},
    "ring": {"vram_gib": 1.0, "expert_cache": 64, "adapt_every": 0},
}


def measure_layers(family: str, threads: int | str) -> LayerCosts:
    """Best of a few looks at each placement, taken in turns so that a busy machine disturbs all of them alike."""
    shape = PROBE_SHAPES[family]
    with tempfile.TemporaryDirectory() as folder, _quietly():
        byte_tokenizer(folder)
        files = tuple(tokenizer_files(Path(folder)))
        model = open_model(str(write_random_pack(Path(folder) / "probe", shape, find, seed=1, tokenizer_files=files)))
        try:
            return _measure(model, threads)
        finally:
            model.close()


def _measure(model: OpenModel, threads: int | str) -> LayerCosts:
    rounds: dict[str, list[float]] = {name: [] for name in PLACEMENTS}
    prompts: dict[str, list[float]] = {name: [] for name in PLACEMENTS}
    reads = loads = 0
    layers = model.config.num_layers
    for _ in range(SLICES):
        for name, options in PLACEMENTS.items():
            requested = Requested(threads=threads, max_context=1024, prefill=Prefill(PROMPT_ROWS, False))  # type: ignore[arg-type]
            runtime = Runtime.open(model, dataclasses.replace(requested, **options))  # type: ignore[arg-type]
            try:
                prompt, each = _play(runtime)
                found = runtime.statistics().experts
            finally:
                runtime.close()
            prompts[name].append(prompt)
            rounds[name].append(each)
            reads = found.misses_file if name == "file" else reads
            loads = found.ring_loads if name == "ring" else loads
    a_round, a_prompt = min(rounds["memory"]), min(prompts["memory"])
    picks = layers * model.config.top_k
    all_loads = max(1, loads)
    assert reads >= picks, "the probe's experts were read from its file"
    return LayerCosts(
        a_round=a_round / layers,
        a_row=max(0.0, a_prompt / layers - a_round / layers) / PROMPT_ROWS,
        a_read=max(0.0, min(rounds["file"]) - a_round) / picks,
        a_load=max(0.0, min(prompts["ring"]) - a_prompt) / all_loads,
    )


def _play(runtime: Runtime) -> tuple[float, float]:
    """(seconds of a prompt, median seconds of a round)."""
    session = Session(runtime)
    ids = [(7 * at) % 251 for at in range(PROMPT_ROWS)]
    began = time.perf_counter()
    session.read_prompt(ids)
    prompt = time.perf_counter() - began
    seconds = []
    for at in range(ROUNDS):
        began = time.perf_counter()
        session.round([at])
        session.commit(1, decoded=True)
        seconds.append(time.perf_counter() - began)
    return prompt, statistics.median(seconds)


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
