"""Lets the model answer training prompts and keeps what is good: one command, whose file train.py learns from.

    python tools/train/sample.py --tokens DIR --weights DIR --out answers.npz --seconds 70

Prompts are the single functions of the training chat stream, asked for in a chat and as a completion; no held-out text
is read. Every prompt is answered greedily; those whose greedy answer is not good are answered again several times with
sampling, and one good answer of each is kept at random (*hard*), beside the good greedy ones, which keep the rest as it
is. Good: ends by itself within ``--longest`` ids, is Python, is the asked function and nothing else (name and arguments
as in the prompt, a body that does something), says no lines twice in a row, is written as the tokenizer would write it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import random
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from answers import Answer, write_answers
from checkpoint import config_of, import_weights
from data import load_stream
from functions import ChatPairs, Lexicon, split_pair
from measure import cut_at_dedent, repeats
from model import TrainModel
from pack import Encoder
from stepwise import Stepwise

__all__ = ["Ask", "asks", "is_good", "sample", "write"]

TEXTS = 4096  # of a batch
MOST_TRIES = 8
LOOK_EVERY = 8  # steps between looks at what has ended: each one waits for the device
OPEN_SHARE = 0.7  # of a batch's texts still open: below it the closed ones are left out
LAST_SHARE = 0.02  # below it a batch is left
LONGEST_PROMPT = 384
BLOCK_LINES, SAID = 4, 8  # lines of a block that must not stand twice, and the characters that it has at least


@dataclass(frozen=True)
class Ask:
    """A prompt: its text is a signature and a docstring; ``chat`` says in which form it is asked. ``head`` and ``body``
    count the ids that the training text answers with: the signature that a chat repeats, and what follows it."""

    text: str
    ids: list[int]
    chat: bool
    head: int = 0
    body: int = 0


def asks(chat: np.ndarray, words: Lexicon, encoder: Encoder) -> list[tuple[Ask, Ask]]:
    """(in a chat, as a completion) of each function of the chat stream, once each.

    Where the stream's ids are not those of the text alone, or the text is no one function, there is none.
    """
    pairs, found = ChatPairs(chat, words), {}
    for number in range(len(pairs.bounds)):
        messages = pairs._messages(number)
        for place in range(len(messages) % 2, len(messages), 2):
            split = split_pair(messages[place][1], messages[place + 1][1], words)
            if split and len(split[0]) <= LONGEST_PROMPT:
                found[tuple(split[0])] = split
    prompts, sizes = [split[0] for split in found.values()], [[len(part) for part in split] for split in found.values()]
    texts = encoder.decoded(prompts)
    again = encoder.many(texts)
    head = encoder.message("user", [])
    opened, closed = head[:-2], head[-2:]
    answered = [encoder.special["<|im_start|>"], *encoder.one("assistant"), *encoder.one("\n")]
    return [
        (
            Ask(text, [*opened, *ids, *closed, *answered], True, head, body),
            Ask(text, [*ids, words.newline], False, 0, body),
        )
        for text, ids, same, (_, head, body) in zip(texts, prompts, again, sizes, strict=True)
        if ids == same and _asked(text) is not None
    ]


def _function(text: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The one function that a text is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(textwrap.dedent(text))
            compile(tree, "", "exec")  # refuses more, such as an argument that is given twice
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    one = tree.body[0] if len(tree.body) == 1 else None
    return one if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str, str]:
    return type(function).__name__, function.name, ast.dump(function.args)


@functools.cache  # a prompt is judged by many times
def _asked(text: str) -> tuple[str, str, str] | None:
    function = _function(text)
    return function and _signature(function)


def is_good(ask: Ask, said: str) -> bool:
    """Whether an answer that ended by itself is the asked function."""
    whole = said if ask.chat else ask.text + "\n" + said
    if not ask.chat and cut_at_dedent(said, ended=True) != said:
        return False
    given = _function(whole)
    if given is None or _signature(given) != _asked(ask.text):
        return False
    idle = all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
               for s in given.body)  # fmt: skip
    return not idle and not _says_twice([line.strip() for line in said.split("\n")])


def _says_twice(lines: list[str]) -> bool:
    """Whether a block of lines stands twice in a row."""
    return any(
        lines[at : at + size] == lines[at + size : at + 2 * size] and len("".join(lines[at : at + size])) >= SAID
        for size in range(1, BLOCK_LINES + 1)
        for at in range(len(lines) - 2 * size + 1)
    )


@torch.no_grad()
def write(
    model: TrainModel,
    prompts: Sequence[list[int]],
    most: int,
    stops: Sequence[int],
    temperature: float | Sequence[float],
    generator: torch.Generator,
    deadline: float,
    last_share: float = LAST_SHARE,
) -> tuple[list[list[int]], int]:
    """(each prompt's continuation of at most ``most`` ids, its stop included; how many tokens were computed).

    All prompts begin at once, and a token that a prompt still has is read instead of the one that was picked. A
    temperature of zero is greedy; each prompt may have its own. What the deadline or the last few open texts (no more
    than ``last_share``) cut has no stop at its end.
    """
    device = model.lm_head.weight.device
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest + most, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids, stop = ids.to(device), torch.tensor(list(stops), device=device)
    begins = torch.tensor([len(p) for p in prompts], device=device)
    ends, rows = begins.clone(), torch.arange(len(prompts), device=device)  # of the open texts: where each ends
    found: list[list[int]] = [[] for _ in prompts]
    first, computed = min(map(len, prompts)), 0
    steps = Stepwise(model, len(prompts), longest + most)
    each = [float(temperature)] * len(prompts) if isinstance(temperature, float | int) else list(temperature)
    heat, sampled = torch.tensor(each, device=device).unsqueeze(1), any(each)

    def collect(which: torch.Tensor) -> None:
        parts = zip(rows[which].tolist(), begins[which].tolist(), ends[which].tolist(), ids[which].tolist(),
                    strict=True)  # fmt: skip
        for row, begin, end, text in parts:
            found[row] = text[begin:end]

    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for at in range(longest + most - 1):
        computed += len(rows)
        x = steps.streams(ids)
        if at + 1 < first:
            continue
        logits = model.logits(x).squeeze(1)
        if sampled:
            logits = logits - heat * torch.empty_like(logits).exponential_(generator=generator).log_()
        writes = (begins <= at + 1) & ~done
        ids[:, at + 1] = torch.where(writes, logits.argmax(-1), ids[:, at + 1])
        ends += writes
        done |= writes & (torch.isin(ids[:, at + 1], stop) | (ends - begins >= most))
        if at % LOOK_EVERY == 0:
            left = int((~done).sum())
            if left <= last_share * len(prompts) or time.perf_counter() > deadline:
                break
            if left < OPEN_SHARE * len(rows):
                collect(done)
                still = (~done).nonzero().squeeze(1)
                steps.keep(still)
                ids, begins, ends, rows, done, heat = (t[still] for t in (ids, begins, ends, rows, done, heat))
    collect(torch.ones_like(done))
    return found, computed


class Sampler:
    """Answers prompts batch by batch and keeps the good ones."""

    def __init__(self, model: TrainModel, encoder: Encoder, words: Lexicon, args: argparse.Namespace) -> None:
        self.model, self.encoder, self.words, self.args = model, encoder, words, args
        self.device = model.lm_head.weight.device
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.rng = random.Random(args.seed)
        self.kept: list[Answer] = []
        self.counts: Counter[str] = Counter()
        self.deadline = time.perf_counter() + args.seconds

    def answered(self, batch: Sequence[Ask], temperature: float) -> list[list[int] | None]:
        """Each prompt's answer with its end; None where it is not good."""
        on_gpu = self.device.type == "cuda"
        ends = [self.words.stop, self.words.end]
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            found, computed = write(self.model, [ask.ids for ask in batch], self.args.longest + 1, ends, temperature,
                                    self.generator, self.deadline)  # fmt: skip
        texts = self.encoder.decoded([ids[:-1] for ids in found])
        # A body's first indentation is a piece of its own because a newline stands before it.
        before = ["" if ask.chat else ask.text + "\n" for ask in batch]
        again = self.encoder.many([a + b for a, b in zip(before, texts, strict=True)])
        whole = [ids[:-1] if ask.chat else ask.ids + ids[:-1] for ask, ids in zip(batch, found, strict=True)]
        self.counts["tokens"] += computed
        good = [
            ids[-1:] == [self.words.stop if ask.chat else self.words.end]
            and as_written == as_said and not repeats(ids) and is_good(ask, text)
            for ask, ids, text, as_written, as_said in zip(batch, found, texts, again, whole, strict=True)
        ]  # fmt: skip
        kind = ("greedy " if temperature == 0 else "sampled ") + ("chats" if batch[0].chat else "completions")
        self.counts[kind] += len(batch)
        self.counts[kind + " that end"] += sum(ids[-1:] in ([e] for e in ends) for ids in found)
        self.counts[kind + ", good"] += sum(good)
        return [ids if ok else None for ids, ok in zip(found, good, strict=True)]

    def batch(self, batch: Sequence[Ask]) -> None:
        """Greedy answers of all, then sampled ones of those that need them."""
        first = self.answered(batch, 0.0)
        self.kept += [Answer(ask.ids, said, False) for ask, said in zip(batch, first, strict=True) if said]
        if self.late:
            return  # what the deadline cut would pass for hard
        hard = [ask for ask, said in zip(batch, first, strict=True) if not said]
        if not hard:
            return
        tries = max(1, min(MOST_TRIES, len(batch) // len(hard)))
        said = self.answered(hard * tries, self.args.temperature)
        self.counts["hard prompts"] += len(hard)
        for number, ask in enumerate(hard):
            good = [one for one in said[number :: len(hard)] if one]
            if good:
                self.kept.append(Answer(ask.ids, self.rng.choice(good), True))
                self.counts["hard prompts, answered well"] += 1

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline


def batches(
    pairs: Sequence[tuple[Ask, Ask]], texts: int, rng: random.Random, completions: Fraction = Fraction(1, 3)
) -> Iterator[list[Ask]]:
    """Prompts of like length and one form, in random order: ``completions`` of them as such and the rest in a chat
    first, then each in its other form."""
    order = rng.sample(range(len(pairs)), len(pairs))
    for turn in (0, 1):
        forms: list[list[Ask]] = [[], []]
        for number in order:
            completes = number * completions // 1 != (number - 1) * completions // 1
            form = int(completes != bool(turn))
            forms[form].append(pairs[number][form])
        cut = []
        for form in forms:
            form.sort(key=lambda ask: len(ask.ids))
            cut += [form[at : at + texts] for at in range(0, len(form), texts)]
        rng.shuffle(cut)
        yield from cut


def sample(args: argparse.Namespace) -> Sampler:
    """Answers until the seconds are spent or every prompt was asked in both forms; writes the file."""
    start = time.perf_counter()
    meta = json.loads((args.tokens / "meta.json").read_text())
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    model = TrainModel(config_of(meta))
    import_weights(model, args.weights)
    model.to(device).requires_grad_(False)
    model.group_experts(device.type == "cuda")
    vocabulary = json.loads((args.tokens / "tokenizer.json").read_text())["model"]["vocab"]
    words, encoder = Lexicon(vocabulary, meta["special"]), Encoder(args.tokens)
    pairs = asks(load_stream(args.tokens, "chat"), words, encoder)
    print(json.dumps({"prompts": len(pairs), "loaded_seconds": round(time.perf_counter() - start, 1)}), flush=True)
    if args.prompts:
        pairs = random.Random(args.seed).sample(pairs, args.prompts)
    sampler, began = Sampler(model, encoder, words, args), time.perf_counter()
    for batch in batches(pairs, args.texts, random.Random(args.seed), args.completions):
        sampler.batch(batch)
        seconds = time.perf_counter() - began
        rate = {"seconds": round(seconds, 1), "tokens_per_second": round(sampler.counts["tokens"] / seconds)}
        print(json.dumps(sampler.counts | {"kept": len(sampler.kept)} | rate), flush=True)
        if sampler.late:
            break
    write_answers(args.out, sampler.kept)
    for one in sampler.kept[:: max(1, len(sampler.kept) // 6)]:
        print(json.dumps({"hard": one.hard, "said": encoder.decoded([one.answer[:-1]])[0]}), flush=True)
    return sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by pack.py, with tokenizer.json")
    parser.add_argument("--weights", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, help="the file of answers")
    parser.add_argument("--seconds", type=float, required=True, help="of sampling, loading apart")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--longest", type=int, default=160, help="ids of an answer")
    parser.add_argument("--completions", type=Fraction, default=Fraction(1, 3), metavar="SHARE",
                        help="of the prompts, each asked in one form first; the others are chats")  # fmt: skip
    parser.add_argument("--prompts", type=int, help="how many functions are asked for (default: all)")
    parser.add_argument("--texts", type=int, default=TEXTS, help="of a batch")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--cpu", action="store_true")
    sample(parser.parse_args())


if __name__ == "__main__":
    main()
