"""Kept answers of the model as rows of training: their file, and how a row is drawn from it.

Lives beside the trainer; sample.py writes the file. A document is a prompt, of which nothing is learned, and an answer
with its end, of which all is. *Hard* ones answer a prompt whose greedy answer was not good: half of the documents of a
row are of these, because only they say something that greedy writing does not. Knows ids, not the model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from functions import Lexicon, Row

__all__ = ["Answer", "Answers", "read_answers", "write_answers"]

HARD_SHARE = 0.5


@dataclass(frozen=True)
class Answer:
    """Ids of a prompt and of its answer, whose last id is an end token."""

    prompt: list[int]
    answer: list[int]
    hard: bool


def write_answers(path: Path, kept: Sequence[Answer]) -> None:
    """One archive: all ids in one run, the lengths of prompts and answers, and which are hard."""
    ids = [i for one in kept for i in (*one.prompt, *one.answer)]
    lengths = np.array([(len(one.prompt), len(one.answer)) for one in kept], dtype=np.int32).reshape(-1, 2)
    np.savez(path, ids=np.array(ids, dtype=np.uint16), lengths=lengths, hard=np.array([one.hard for one in kept], bool))


def read_answers(path: Path) -> list[Answer]:
    with np.load(path) as held:
        ids, lengths, hard = held["ids"].tolist(), held["lengths"].tolist(), held["hard"].tolist()
    kept, at = [], 0
    for (asked, said), is_hard in zip(lengths, hard, strict=True):
        kept.append(Answer(ids[at : at + asked], ids[at + asked : at + asked + said], is_hard))
        at += asked + said
    return kept


class Answers:
    """Draws documents from kept answers. Raises ValueError where there is none."""

    def __init__(self, kept: Sequence[Answer], words: Lexicon) -> None:
        if not kept:
            raise ValueError("no answer was kept: sample more of them, or leave answers out of --mix")
        self.words = words
        self.groups = [group for group in ([a for a in kept if a.hard], [a for a in kept if not a.hard]) if group]

    def document(self, rng: random.Random) -> Row:
        """A prompt and its answer; what ends a message is followed by the end of the text, which is not learned."""
        one = rng.choice(self.groups[0 if rng.random() < HARD_SHARE else -1])
        closed = [] if one.answer[-1] == self.words.end else [self.words.end]
        learned = [False] * len(one.prompt) + [True] * len(one.answer) + [False] * len(closed)
        return [*one.prompt, *one.answer, *closed], learned
