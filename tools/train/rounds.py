"""One round of reinforcement without its learning: prompts are drawn, answered by the model as it is, and judged.

Lives beside reinforce.py, which learns from what comes back. Of each prompt several answers are sampled; what one is
worth is how much better it is than the others of its prompt, so a prompt whose answers are all good or all bad says
nothing. The surest answer is a hollow one, so a body much shorter than the true one is not good. Judging parses every
answer, which processes of their own share. Knows prompts and answers, no gradients.
"""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch
from functions import Lexicon
from measure import repeats
from model import TrainModel
from pack import Encoder
from sample import Ask, is_good, write

__all__ = ["Answering", "Judge", "Limits", "Prompts", "Text", "advantages", "is_hollow", "rate_good", "summary"]

Claim = tuple[str, bool, str]
"""A prompt's text, whether it was asked in a chat, and what the model said."""
LEAST_PART, LEAST = 5, 10  # a body has a fifth of the true one's ids, or so many
CLAIMS = 64  # that a judge takes at once
LAST_SHARE = 0.01  # of a round's texts: when no more are open they are left, and are not good


@dataclass
class Text:
    """A prompt and what the model said, of which ``ended`` says whether it closed it by itself within its limit."""

    ask: Ask
    said: list[int]
    ended: bool
    good: bool
    advantage: float = 0.0
    before: torch.Tensor | None = field(default=None, repr=False)  # each said id's log-probability when it was said

    def __len__(self) -> int:
        return len(self.ask.ids) + len(self.said)


@dataclass(frozen=True)
class Limits:
    """Ids that an answer may have, its end included."""

    chat: int
    completion: int

    def of(self, ask: Ask) -> int:
        return self.chat if ask.chat else self.completion


def is_hollow(ask: Ask, said: Sequence[int]) -> bool:
    """Whether an answer, its end included, says much less than the training text does there."""
    return len(said) - 1 - ask.head < min(LEAST, ask.body // LEAST_PART)


def advantages(good_GK: np.ndarray) -> np.ndarray:
    """How much better each answer is than its prompt's mean, in standard deviations; zero where all are alike."""
    mean = good_GK.mean(1, keepdims=True)
    spread = np.sqrt(mean * (1 - mean))
    found: np.ndarray = np.divide(good_GK - mean, spread, out=np.zeros(good_GK.shape), where=spread > 0)
    return found


class Judge:
    """Says which answers are good, in so many processes; none: in this one.

    Start it before the accelerator is used: its processes are forks of this one.
    """

    def __init__(self, processes: int) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(processes) if processes else None

    def good(self, claims: Sequence[Claim]) -> list[bool]:
        if self._pool is None:
            return [_is_good(claim) for claim in claims]
        return self._pool.map(_is_good, claims, CLAIMS)

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.terminate()


def _is_good(claim: Claim) -> bool:
    text, chat, said = claim
    return is_good(Ask(text, [], chat), said)


class Prompts:
    """Draws functions in random order, ``chats`` of them asked for in a chat and the rest as completions.

    ``aside`` of them, in both forms, are never drawn: ``kept``, on which progress is measured.
    """

    def __init__(self, pairs: Sequence[tuple[Ask, Ask]], longest: int, aside: int, chats: float, seed: int) -> None:
        self._rng = random.Random(seed)
        short = [pair for pair in pairs if len(pair[0].ids) <= longest]
        if len(short) <= aside:
            raise ValueError(f"{len(short)} prompts of at most {longest} ids: keep fewer than {aside} aside")
        order = self._rng.sample(short, len(short))
        self.kept = [ask for pair in order[:aside] for ask in pair]
        self._pairs, self._chats = order[aside:], chats
        self._left: list[tuple[Ask, Ask]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def draw(self, count: int) -> list[Ask]:
        """Each function once before any comes again."""
        found = []
        for number in range(count):
            if not self._left:
                self._left = self._rng.sample(self._pairs, len(self._pairs))
            in_chat = math.floor((number + 1) * self._chats) > math.floor(number * self._chats)
            found.append(self._left.pop()[0 if in_chat else 1])
        return found


class Answering:
    """Lets the model answer, and judges: ``texts``."""

    def __init__(
        self, model: TrainModel, encoder: Encoder, words: Lexicon, judge: Judge, limits: Limits, seed: int
    ) -> None:
        self.model, self.encoder, self.words, self.judge, self.limits = model, encoder, words, judge, limits
        self.generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)

    def said(self, batch: Sequence[Ask], temperatures: Sequence[float]) -> list[list[int]]:
        """Each prompt's answer, no longer than its form's limit; a temperature of zero is greedy."""
        device = self.model.lm_head.weight.device
        most, stops = max(map(self.limits.of, batch)), [self.words.stop, self.words.end]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found, _ = write(self.model, [ask.ids for ask in batch], most, stops, temperatures, self.generator,
                             math.inf, last_share=LAST_SHARE)  # fmt: skip
        return [ids[: self.limits.of(ask)] for ask, ids in zip(batch, found, strict=True)]

    def judged(self, batch: Sequence[Ask], said: Sequence[list[int]]) -> list[Text]:
        ends = [self.words.stop if ask.chat else self.words.end for ask in batch]
        ended = [ids[-1:] == [end] for ids, end in zip(said, ends, strict=True)]
        words = self.encoder.decoded([ids[:-1] for ids in said])
        claims = {
            number: (batch[number].text, batch[number].chat, words[number])
            for number, ids in enumerate(said)
            if ended[number] and not repeats(ids) and not is_hollow(batch[number], ids)
        }
        verdicts = dict(zip(claims, self.judge.good(list(claims.values())), strict=True))
        return [
            Text(ask, ids, done, verdicts.get(number, False))
            for number, (ask, ids, done) in enumerate(zip(batch, said, ended, strict=True))
        ]


def rate_good(texts: Sequence[Text], tries: int) -> None:
    """Writes each text's advantage; ``tries`` in a row answer one prompt."""
    found = advantages(np.array([text.good for text in texts], dtype=np.float64).reshape(-1, tries))
    for text, advantage in zip(texts, found.flatten().tolist(), strict=True):
        text.advantage = advantage


def summary(texts: Sequence[Text]) -> dict[str, float]:
    """Of each form: percent that are good and that end, and the mean length."""
    found = {}
    for name, chat in (("chats", True), ("completions", False)):
        some = [text for text in texts if text.ask.chat == chat]
        if some:
            count = len(some)
            found[f"{name}_good"] = round(100 * sum(text.good for text in some) / count, 2)
            found[f"{name}_end"] = round(100 * sum(text.ended for text in some) / count, 2)
            found[f"{name}_ids"] = round(sum(len(text.said) for text in some) / count, 1)
    return found
