"""Training batches: windows of the code and chat streams, and rows of retrieval, of functions and of kept answers.

Lives beside the trainer. A step's batch is a pure function of the seed and the step's number, so a resumed run reads
on where it stopped. Knows tokens, not the model.

A retrieval window is one to three documents of 1,024 to 4,096 tokens: code lines, with lines such as
``TABLE["amber_falcon"] = "plain_letter"`` strewn in, then ``assert TABLE["amber_falcon"] == "plain_letter"``.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from answers import Answers, read_answers
from functions import ChatPairs, CodeFunctions, Lexicon, Row, fill_row
from group import Group

__all__ = ["Batch", "Batches", "RetrievalMaker", "load_code", "load_stream", "read_mix", "turns"]

CHAT_ROWS = 3  # of 16 rows: a fifth of the text
RETRIEVAL_ROWS = 1
KINDS = ("code", "chat", "functions", "retrieval", "answers")


def load_stream(folder: Path, *names: str) -> np.ndarray:
    """The uint16 ids of one or more packed files, joined."""
    parts = [np.frombuffer(lzma.decompress((folder / f"{n}.u16.xz").read_bytes()), dtype="<u2") for n in names]
    return np.concatenate(parts)


def load_code(folder: Path) -> np.ndarray:
    """The code stream, or as much of it as the folder holds."""
    return load_stream(folder, *(p.name.removesuffix(".u16.xz") for p in sorted(folder.glob("code-*.u16.xz"))))


def read_mix(text: str | None, rows: int) -> dict[str, int]:
    """Rows of each kind from ``code=8,chat=11,functions=11,retrieval=2``; None: the shares of a first part."""
    if text is None:
        chat, retrieval = (max(1, rows * share // 16) for share in (CHAT_ROWS, RETRIEVAL_ROWS))
        return dict.fromkeys(KINDS, 0) | {"code": rows - chat - retrieval, "chat": chat, "retrieval": retrieval}
    mix = dict.fromkeys(KINDS, 0)
    for part in text.split(","):
        kind, _, count = part.partition("=")
        if kind not in mix or not count.isdecimal():
            raise ValueError(f"--mix has {part!r}; it takes KIND=ROWS of {', '.join(KINDS)}")
        mix[kind] = int(count)
    if sum(mix.values()) != rows:
        raise ValueError(f"--mix names {sum(mix.values())} rows, --rows {rows}: make them equal")
    return mix


class RetrievalMaker:
    """Makes retrieval documents from a stream of code and the word pieces of meta.json."""

    def __init__(self, meta: dict[str, Any], filler: np.ndarray) -> None:
        facts = meta["retrieval"]
        self.words: list[tuple[list[int], list[int]]] = facts["words"]
        self.pieces: dict[str, list[int]] = facts["pieces"]
        self.tables: list[tuple[list[int], list[int]]] = facts["tables"]
        self.end: int = meta["special"]["<|endoftext|>"]
        self.newline: int = self.pieces["newline"][0]
        self.filler = filler

    def _name(self, rng: np.random.Generator) -> list[int]:
        first, second = rng.integers(len(self.words), size=2)
        return [*self.words[first][0], *self.words[second][1]]

    def document(self, rng: np.random.Generator, tokens: int, queries: int) -> tuple[list[int], list[list[int]]]:
        """(ids of about ``tokens``, the answers' ids of its queries, each closed by its quote).

        With one query the document ends where its answer would begin, and the answer is not part of it.
        """
        p = self.pieces
        table, spaced = self.tables[rng.integers(len(self.tables))]
        pairs = [(self._name(rng), self._name(rng)) for _ in range(int(rng.integers(6, 33)))]
        lines = [[*table, *p["open"], *key, *p["set"], *value, *p["close"]] for key, value in pairs]
        asked = [pairs[i] for i in rng.permutation(len(pairs))[: max(queries, 1)]]
        checks = [[*p["assert"], *spaced, *p["open"], *key, *p["is"], *value, *p["close"]] for key, value in asked]
        room = tokens - sum(map(len, lines)) - sum(map(len, checks)) - 1
        offset = int(rng.integers(0, max(1, len(self.filler) - room)))
        text = self.filler[offset : offset + max(room, 0)]
        text = np.where(text == self.end, self.newline, text)
        breaks = np.flatnonzero(text == self.newline) + 1
        cuts = sorted(rng.choice(breaks, size=len(lines))) if len(breaks) else [0] * len(lines)
        ids: list[int] = []
        before = 0
        for cut, line in zip(cuts, lines, strict=True):
            ids += text[before:cut].tolist() + line
            before = cut
        ids += text[before:].tolist() + p["newline"]
        if queries == 1:
            key, value = asked[0]
            ids += [*p["assert"], *spaced, *p["open"], *key, *p["is"]]
            return ids, [[*value, p["close"][0]]]
        return ids + [i for check in checks for i in check], [[*value, p["close"][0]] for _, value in asked]

    def window(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """``length`` ids: whole documents one after another, the last one's tail cut."""
        ids: list[int] = []
        while len(ids) < length:
            left = length - len(ids)
            size = left if left < 2048 else int(rng.integers(1024, left + 1))
            document, _ = self.document(rng, size, int(rng.integers(4, 17)))
            ids += [*document, self.end]
        return np.array(ids[:length], dtype=np.int64)


class Batch(NamedTuple):
    """``windows`` int64 [B, T + 2]; ``weights`` FP32 of the same shape: 0 where nothing is learned, elsewhere one
    value, or a multiple of it at a turn; their mean over these rows is one. None: all is learned alike."""

    windows: torch.Tensor
    weights: torch.Tensor | None


Made = tuple[np.ndarray, np.ndarray]


class Batches:
    """``batch(step)``: this process's rows of code, chat, functions, retrieval and ``answers``, as ``mix`` says.

    With ``stutter`` above zero chat rows too are whole documents; it is the share of bodies that stutter. ``longest``
    bounds the bodies of whole documents, in tokens. ``turn`` is what a turn of them counts: the first token that is
    learned after some that are not (a body's first, and the one that leaves a repetition), and a learned end token.
    """

    def __init__(
        self,
        folder: Path,
        mix: Mapping[str, int],
        length: int,
        seed: int,
        group: Group,
        stutter: float = 0.0,
        longest: int | None = None,
        turn: float = 1.0,
        answers: Path | None = None,
    ) -> None:
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        code, chat = load_code(folder), load_stream(folder, "chat")
        self.mix, self.length, self.seed, self.device, self.stutter = mix, length, seed, group.device, stutter
        ends = np.cumsum([mix[kind] for kind in KINDS]).tolist()
        self.turn = turn
        self.mine = {  # of each kind's rows, those that fall to this process
            kind: [row for row in range(mix[kind]) if (end - mix[kind] + row) % group.size == group.rank]
            for kind, end in zip(KINDS, ends, strict=True)
        }
        self.maker = RetrievalMaker(self.meta, code)
        self.streams = [torch.from_numpy(s.astype(np.int32)).to(self.device) for s in (code, chat)]
        self.windowed = ("code",) if stutter else ("code", "chat")
        self.whole = stutter > 0 or mix["functions"] > 0 or mix["answers"] > 0  # some rows are whole documents
        if self.whole:
            vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
            words = Lexicon(vocabulary, self.meta["special"])
            self.pairs, self.code_functions = ChatPairs(chat, words, longest), CodeFunctions(code, words, longest)
            self.ends = [words.end, words.stop]
            if mix["answers"]:
                if answers is None:
                    raise ValueError("--mix names rows of answers: give their file with --answers")
                kept = [one for one in read_answers(answers) if longest is None or len(one.answer) <= longest]
                self.answers = Answers(kept, words)
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._pool = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[Made]] | None = None

    def epochs(self, step: int) -> float:
        """How often the code stream has been read through after ``step`` steps."""
        return step * self.mix["code"] * self.length / len(self.streams[0])

    def _starts(self, which: int, first: int, count: int) -> np.ndarray:
        """Window starts number ``first`` ... of a stream: each pass is a new order at a new offset."""
        per_pass = (len(self.streams[which]) - 2) // self.length - 1
        found = []
        for number in range(first, first + count):
            turn, index = divmod(number, per_pass)
            if (which, turn) not in self._orders:
                rng = np.random.default_rng((self.seed, which, turn))
                self._orders[which, turn] = rng.permutation(per_pass) * self.length + rng.integers(self.length)
            found.append(self._orders[which, turn][index])
        return np.array(found)

    def _documents(self, kind: str, step: int) -> list[Made]:
        """Rows of whole documents: conversations, kept answers, or functions, about every other one of the chat
        pairs."""
        made = []
        for row in self.mine[kind]:
            rng = random.Random(f"{self.seed} {kind} {step} {row}")

            def take(rng: random.Random = rng) -> Row:
                if kind == "chat":
                    return self.pairs.conversation(rng, self.stutter)
                if kind == "answers":
                    return self.answers.document(rng)
                source = self.pairs if rng.random() < 0.5 else self.code_functions
                return source.function(rng, self.stutter)

            made.append(fill_row(take, self.length + 2))
        return made

    def _made(self, step: int) -> Made:
        """The rows that are no windows of a stream: chat where it stutters, functions, answers, retrieval."""
        chat = self._documents("chat", step) if self.stutter else []
        rng = np.random.default_rng((self.seed, 77, step))
        retrieval = [self.maker.window(rng, self.length + 2) for _ in range(self.mix["retrieval"])]
        asked = [(retrieval[row], np.ones(self.length + 2, bool)) for row in self.mine["retrieval"]]
        rows = [*chat, *self._documents("functions", step), *self._documents("answers", step), *asked]
        empty = np.zeros((0, self.length + 2), np.int64)  # a process may have none of these
        return (
            np.concatenate([empty, *(ids[None] for ids, _ in rows)]),
            np.concatenate([empty.astype(bool), *(learned[None] for _, learned in rows)]),
        )

    def batch(self, step: int) -> Batch:
        ids, learned = self._ahead[1].result() if self._ahead and self._ahead[0] == step else self._made(step)
        self._ahead = (step + 1, self._pool.submit(self._made, step + 1))
        span = torch.arange(self.length + 2, device=self.device)
        parts = []
        for which, kind in enumerate(self.windowed):
            starts = self._starts(which, step * self.mix[kind], self.mix[kind])[self.mine[kind]].astype(np.int64)
            starts = torch.from_numpy(starts).to(self.device)
            parts.append(self.streams[which][starts[:, None] + span].long())
        parts.append(torch.from_numpy(ids).to(self.device, non_blocking=True))
        windows = torch.cat(parts)
        if not self.whole:
            return Batch(windows, None)
        read = np.ones((len(windows) - len(learned), self.length + 2), np.float32)
        weights = np.concatenate([read, np.where(turns(ids, learned, self.ends), self.turn, 1.0) * learned])
        weights /= weights[:, 1:-1].mean()
        return Batch(windows, torch.from_numpy(weights.astype(np.float32)).to(self.device))


def turns(ids: np.ndarray, learned: np.ndarray, ends: list[int]) -> np.ndarray:
    """Where a learned token comes after one that is not, or ends a text."""
    found = np.isin(ids, ends) & learned
    found[:, 1:] |= learned[:, 1:] & ~learned[:, :-1]
    return found
