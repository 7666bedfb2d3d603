"""Golden values of the shipped pack, for tests/data: greedy ids, logits, and bits per byte of a short held-out text.

Lives beside the trainer; tests/data/test_small_model.py compares. Ids are compared exactly, since the engine's rows are
the same bits on every processor; logits and bits per byte within a tolerance. Knows packs and prompts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import SEED
from subject import Subject

from strata.cli.demo import DEFAULT_PROMPT
from strata.engine.session import Session

__all__ = ["GOLDEN_FILE", "make_goldens"]

GOLDEN_FILE = "small_golden.json"
PROMPTS = 10
LONGEST = 120  # ids of a prompt
TOKENS = 24
WINDOW = 1024
LOGITS = 8  # the largest, of each prompt's last row


def choose_prompts(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The demo's own, then the first of each package in turn, so that no package has all the prompts."""
    left = [p for p in meta["completions"] if len(p["ids"]) <= LONGEST]
    chosen = [p for p in left if p["text"] + "\n" == DEFAULT_PROMPT]
    assert chosen, "the demo's prompt is held out"
    left.remove(chosen[0])
    while left and len(chosen) < PROMPTS:
        for package in dict.fromkeys(p["package"] for p in left):
            if len(chosen) < PROMPTS:
                chosen.append(next(p for p in left if p["package"] == package))
        left = [p for p in left if p not in chosen]
    return chosen


def make_goldens(pack: Path, meta: dict[str, Any], heldout: np.ndarray, path: Path) -> None:
    """Computes the goldens of a pack and writes them to ``path``."""
    starts = np.random.default_rng(SEED + 1).permutation((len(heldout) - 1) // WINDOW)[:2]
    windows = [heldout[s * WINDOW : (s + 1) * WINDOW + 1].tolist() for s in starts]
    end = meta["special"]["<|endoftext|>"]
    with Subject(pack) as subject:
        tokenizer = subject.opened.text.tokenizer
        text_bytes = sum(len(tokenizer.token_bytes(i)) for window in windows for i in window[1:] if i != end)
        nats = sum(subject.text(windows).nats)
        prompts = [golden(subject, prompt, end) for prompt in choose_prompts(meta)]
    table = {
        "bits_per_byte": nats / math.log(2) / text_bytes,
        "text_bytes": text_bytes,
        "windows": windows,
        "prompts": prompts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, separators=(",", ":")).replace('{"package"', '\n{"package"') + "\n")


def golden(subject: Subject, prompt: dict[str, Any], end: int) -> dict[str, Any]:
    ids = subject.greedy(prompt["ids"], TOKENS, lambda found: found[-1] == end)
    logits = Session(subject.runtime).read_prompt(prompt["ids"])
    order = torch.sort(logits, descending=True, stable=True).indices[:LOGITS].tolist()
    return {
        "package": prompt["package"],
        "text": prompt["text"],
        "ids": prompt["ids"],
        "greedy": ids,
        "largest": [[i, round(float(logits[i]), 4)] for i in order],
    }
