"""Greedy continuations in one batch are those of every prompt by itself; bodies are cut where they end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

from measure import Measures, cut_at_dedent
from model import Config, TrainModel

SIZES: dict[str, Any] = {
    "vocabulary": 64,
    "hidden": 32,
    "layers": 4,
    "heads": 2,
    "head_width": 16,
    "kv_heads": 1,
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "delta_width": 16,
    "experts": 4,
    "expert_width": 16,
    "shared_width": 16,
    "rank": 8,
    "ple_width": 32,
    "ngram_base": 64,
    "index_width": 16,
    "index_budget": 32,
    "context": 128,
    "eos": (1, 3),
}


@torch.no_grad()
def test_a_batch_of_prompts_is_continued_as_each_is_alone() -> None:
    model = TrainModel(Config(**SIZES))
    model.initialise(4)
    for p in model.parameters():
        p.mul_(2.0)
    tokenizer: Any = None
    measures = Measures(model, {}, np.zeros(4, np.uint16), tokenizer, None)
    prompts = [[5, 6, 7], list(range(4, 60)), [9] * 20]
    ends: set[int] = set()
    alone = [measures.generate([prompt], 12, ends)[0] for prompt in prompts]
    assert all(len(ids) == 12 for ids in alone)
    assert measures.generate(prompts, 12, ends) == alone
    ids, none = list(prompts[0]), torch.zeros(1, dtype=torch.long)
    for _ in range(12):
        window = torch.tensor([ids + [0] * (64 - len(ids))])
        ids.append(int(model.logits(model.hidden(window, none)[0])[0, len(ids) - 1].argmax()))
    assert ids[3:] == alone[0]
    stop = alone[1][4]
    expected = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in alone]
    assert measures.generate(prompts, 12, {stop}) == expected


def test_a_last_line_is_dropped_only_where_the_limit_cut_it() -> None:
    assert cut_at_dedent("    a = 1\n    return (a") == "    a = 1"
    assert cut_at_dedent("    a = 1\n    return a", ended=True) == "    a = 1\n    return a"
    assert cut_at_dedent("    a = 1\n\n\ndef b():\n    pass\n") == "    a = 1\n\n"
