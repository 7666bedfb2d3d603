"""Training batches: windows of the code and chat streams, and retrieval windows made as they are needed.

Lives beside the trainer. A step's batch is a pure function of the seed and the step's number, so a resumed run reads
on where it stopped. Knows tokens, not the model.

A retrieval window is one to three documents of 1,024 to 4,096 tokens: code lines, with lines such as
``TABLE["amber_falcon"] = "plain_letter"`` strewn in, then ``assert TABLE["amber_falcon"] == "plain_letter"``.
"""

from __future__ import annotations

import json
import lzma
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Batches", "RetrievalMaker", "load_stream"]

CHAT_ROWS = 3  # of 16 rows: a fifth of the text
RETRIEVAL_ROWS = 1


def load_stream(folder: Path, *names: str) -> np.ndarray:
    """The uint16 ids of one or more packed files, joined."""
    parts = [np.frombuffer(lzma.decompress((folder / f"{n}.u16.xz").read_bytes()), dtype="<u2") for n in names]
    return np.concatenate(parts)


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


class Batches:
    """``batch(step)`` is B windows of T + 2 ids on ``device``: code, chat and retrieval rows in fixed shares."""

    def __init__(self, folder: Path, rows: int, length: int, seed: int, device: torch.device) -> None:
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        code, chat = load_stream(folder, "code-0", "code-1"), load_stream(folder, "chat")
        self.rows, self.length, self.seed, self.device = rows, length, seed, device
        self.chat_rows = max(1, rows * CHAT_ROWS // 16)
        self.retrieval_rows = max(1, rows * RETRIEVAL_ROWS // 16)
        self.code_rows = rows - self.chat_rows - self.retrieval_rows
        self.maker = RetrievalMaker(self.meta, code)
        self.streams = [torch.from_numpy(s.astype(np.int32)).to(device) for s in (code, chat)]
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._pool = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[np.ndarray]] | None = None

    def epochs(self, step: int) -> float:
        """How often the code stream has been read through after ``step`` steps."""
        return step * self.code_rows * self.length / len(self.streams[0])

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

    def _retrieval(self, step: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, 77, step))
        return np.stack([self.maker.window(rng, self.length + 2) for _ in range(self.retrieval_rows)])

    def batch(self, step: int) -> torch.Tensor:
        made = self._ahead[1].result() if self._ahead and self._ahead[0] == step else self._retrieval(step)
        self._ahead = (step + 1, self._pool.submit(self._retrieval, step + 1))
        span = torch.arange(self.length + 2, device=self.device)
        parts = []
        for which, rows in ((0, self.code_rows), (1, self.chat_rows)):
            starts = torch.from_numpy(self._starts(which, step * rows, rows)).to(self.device)
            parts.append(self.streams[which][starts[:, None] + span].long())
        parts.append(torch.from_numpy(made).to(self.device, non_blocking=True))
        return torch.cat(parts)
