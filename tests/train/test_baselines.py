"""The 5-gram model against one written with dictionaries, and probabilities that add up to one."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))

from baselines import NgramModel, xz_bits_per_byte


def plain(training: list[int], query: list[int], order: int, vocabulary: int) -> float:
    """Witten-Bell from the bottom up, one token at a time."""
    pairs: Counter[tuple[int, ...]] = Counter()
    after: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    totals: Counter[tuple[int, ...]] = Counter()
    for n in range(1, order + 1):
        for at in range(len(training) - n + 1):
            gram = tuple(training[at : at + n])
            pairs[gram] += 1
            totals[gram[:-1]] += 1
            after[gram[:-1]].add(gram[-1])
    nats = 0.0
    for at in range(order - 1, len(query)):
        p = 1 / vocabulary
        for n in range(1, order + 1):
            context = tuple(query[at - n + 1 : at])
            if totals[context]:
                kinds = len(after[context])
                p = (pairs[(*context, query[at])] + kinds * p) / (totals[context] + kinds)
        nats -= math.log(p)
    return nats


@pytest.mark.parametrize("order", [1, 2, 5])
def test_counts_where_needed_are_counts_everywhere(order: int) -> None:
    rng = np.random.default_rng(order)
    training = rng.integers(0, 6, 400).astype(np.uint16)
    queries = [rng.integers(0, 8, 40).tolist(), rng.integers(0, 4, 25).tolist()]
    found = NgramModel(training, order, 8).nats(queries)
    expected = [plain(training.tolist(), query, order, 8) for query in queries]
    assert found == pytest.approx(expected, rel=1e-12)


def test_probabilities_add_up_to_one() -> None:
    training = np.random.default_rng(0).integers(0, 5, 300).astype(np.uint16)
    model = NgramModel(training, 3, 7)
    assert sum(math.exp(-nats) for nats in model.nats([[1, 2, word] for word in range(7)])) == pytest.approx(1.0)


def test_slices_of_the_training_text_count_every_gram_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import baselines

    training = np.random.default_rng(1).integers(0, 6, 500).astype(np.uint16)
    query = [training[:60].tolist()]
    whole = NgramModel(training, 4, 8).nats(query)
    monkeypatch.setattr(baselines, "_SLICE", 37)
    assert NgramModel(training, 4, 8).nats(query) == whole


def test_xz_sees_a_repetition() -> None:
    noise = np.random.default_rng(2).bytes(4000)
    assert xz_bits_per_byte(noise * 4) < 0.3 * xz_bits_per_byte(noise)
