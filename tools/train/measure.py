"""What the trained model can do, measured with the trainer's batched forward: used at the end of each training part.

Lives beside the trainer; evaluate.py measures the same on a finished checkpoint and adds the baselines. Every figure
is on held-out packages. Knows the model only through ``hidden``, ``drafted`` and ``logits``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from data import RetrievalMaker
from model import TrainModel
from pack import parses
from tokenizers import Tokenizer

__all__ = ["Measures"]


class Measures:
    """``limit`` bounds the windows of each measure (None: the whole held-out text)."""

    def __init__(
        self, model: TrainModel, meta: dict[str, Any], heldout: np.ndarray, tokenizer: Tokenizer, limit: int | None
    ) -> None:
        self.model, self.meta, self.heldout, self.tokenizer, self.limit = model, meta, heldout, tokenizer, limit
        self.device = model.lm_head.weight.device
        self.length = model.c.context
        self.samples: list[str] = []  # what was generated, for people
        self.none_R = torch.zeros(1, dtype=torch.long, device=self.device)

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """BF16 products on a GPU, as in training; nothing is compiled anew for the many shapes met here."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu), torch.compiler.set_stance("force_eager"):
            yield

    def _windows(self, rows: int) -> list[torch.Tensor]:
        count = (len(self.heldout) - 2) // self.length
        count = count if self.limit is None else min(count, self.limit)
        starts = torch.arange(count)[:, None] * self.length + torch.arange(self.length + 2)
        ids = torch.from_numpy(self.heldout.astype(np.int64))[starts]
        return [part.to(self.device) for part in ids.split(rows)]

    @torch.no_grad()
    def text(self) -> dict[str, float]:
        """Bits per byte, dense and sparse, and how often the first draft is what the model would say.

        Windows are cut without overlap, so early tokens of a window are seen with little context.
        """
        nats = sparse_nats = agreed = tokens = 0.0
        with self._measuring():
            for window in self._windows(16):
                ids, targets = window[:, :-2], window[:, 1:-1]
                x, _ = self.model.hidden(ids, self.none_R)
                nats += float(self.model.cross_entropy(x, targets, False).double().sum())
                y, _ = self.model.drafted(x, targets, self.none_R)
                drafts, said = self.model.logits(y, draft=True).argmax(-1), self.model.logits(x).argmax(-1)
                agreed += float((drafts[:, :-1] == said[:, 1:]).double().mean()) * targets.numel()
                z, _ = self.model.hidden(ids, self.none_R, sparse=True)
                sparse_nats += float(self.model.cross_entropy(z, targets, False).double().sum())
                tokens += targets.numel()
        per_byte = len(self.heldout) / self.meta["heldout_bytes"] / math.log(2)
        dense, sparse = nats / tokens * per_byte, sparse_nats / tokens * per_byte
        return {
            "bits_per_byte": dense,
            "bits_per_byte_sparse": sparse,
            "sparse_over_dense_percent": (sparse / dense - 1) * 100,
            "draft_agreement_percent": agreed / tokens * 100,
            "heldout_tokens": tokens,
        }

    @torch.no_grad()
    def retrieval(self, count: int = 100) -> dict[str, float]:
        """Share of questions at 1,024 to 4,096 tokens answered exactly, dense and past the index budget."""
        maker, rng = RetrievalMaker(self.meta, self.heldout), np.random.default_rng(5)
        right = right_sparse = 0
        span = min(self.length, 4096)
        with self._measuring():
            for _ in range(count // 4):
                rows, answers, ends = [], [], []
                for _ in range(4):
                    ids, (answer,) = maker.document(rng, int(rng.integers(span // 4, span - 16)), 1)
                    ends.append(len(ids))
                    answers.append(answer)
                    rows.append((ids + answer + [maker.end] * span)[:span])
                window = torch.tensor(rows, device=self.device)
                for sparse in (False, True):
                    x, _ = self.model.hidden(window, self.none_R, sparse)
                    said = self.model.logits(x).argmax(-1)
                    for row, (end, answer) in enumerate(zip(ends, answers, strict=True)):
                        good = said[row, end - 1 : end - 1 + len(answer)].tolist() == answer
                        right, right_sparse = right + (good and not sparse), right_sparse + (good and sparse)
        return {"retrieval_percent": right * 100 / count, "retrieval_sparse_percent": right_sparse * 100 / count}

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], tokens: int, stops: set[int]) -> list[list[int]]:
        """Greedy continuations, a stop id included: the whole prefix is computed again for each token."""
        length = -(-(max(map(len, prompts)) + tokens) // 64) * 64
        ids = torch.zeros(len(prompts), length, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        ends = torch.tensor([len(p) for p in prompts], device=self.device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        stop = torch.tensor(sorted(stops), device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        with self._measuring():
            for _ in range(tokens):
                open_rows = rows[~done]
                if len(open_rows) == 0:
                    break
                last = ends[open_rows] - 1
                used = min(length, -(-int(last.max() + 1) // 64) * 64)
                x, _ = self.model.hidden(ids[open_rows, :used], self.none_R)
                picked = x[torch.arange(len(open_rows), device=self.device), last]
                said = self.model.logits(picked.unsqueeze(1)).argmax(-1).squeeze(1)
                ids[open_rows, last + 1] = said
                ends[open_rows] += 1
                done[open_rows] = torch.isin(said, stop)
        return [ids[row, len(p) : int(ends[row])].tolist() for row, p in enumerate(prompts)]

    def completions(self) -> dict[str, float]:
        """Held-out ``def`` lines with docstring: share that parses when cut at the dedent, share that loops."""
        prompts = self.meta["completions"]
        end = self.meta["special"]["<|endoftext|>"]
        found = self.generate([p["ids"] for p in prompts], 96, {end})
        good = loops = 0
        for prompt, ids in zip(prompts, found, strict=True):
            text = self.tokenizer.decode([i for i in ids if i != end], skip_special_tokens=False)
            body = cut_at_dedent(text, ended=ids[-1] == end)
            good += bool(body.strip()) and parses(prompt["text"] + "\n" + body)
            loops += repeats(ids)
            self.samples.append(body)
        return {"completions_parse": float(good), "completions_loop": float(loops), "prompts": float(len(prompts))}

    def chats(self) -> dict[str, float]:
        """The same as chat requests: share that gives code which parses, that ends by itself within 256, and both."""
        prompts, special = self.meta["completions"], self.meta["special"]
        stops = {special["<|im_end|>"], special["<|endoftext|>"]}
        found = self.generate([p["chat_ids"] for p in prompts], 256, stops)
        ended = [ids[-1] in stops for ids in found]
        answers = [self.tokenizer.decode([i for i in ids if i not in stops]) for ids in found]
        code = [parses(answer) and "def " in answer for answer in answers]
        self.samples += answers
        both = sum(e and c for e, c in zip(ended, code, strict=True))
        return {"chat_end": float(sum(ended)), "chat_code": float(sum(code)), "chat_good": float(both)}


def cut_at_dedent(body: str, ended: bool = False) -> str:
    """The lines of a completion up to the first that is not indented; a last line cut by the limit, not ``ended`` by
    the model, is dropped."""
    lines = body.split("\n")
    kept = []
    for line in lines:
        if line.strip() and not line.startswith((" ", "\t")):
            return "\n".join(kept)
        kept.append(line)
    return "\n".join(kept[:-1]) if len(kept) > 1 and not ended else body


def repeats(ids: list[int]) -> bool:
    """Whether the last 48 ids are one piece of at most 16 ids over and over."""
    tail = ids[-48:]
    return len(tail) == 48 and any(tail[p:] == tail[:-p] for p in range(1, 17))
