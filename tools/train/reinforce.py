"""Lets the model learn from its own good and bad answers: one command, time-boxed, evaluated at its end.

    python tools/train/reinforce.py --tokens DIR --weights DIR --state DIR --out DIR --seconds 180

A round draws functions of the training text, samples several answers of each (rounds.py), and takes a few steps of the
policy gradient on them: a token of an answer becomes likelier where the answer is better than the others of its prompt,
and less likely where it is worse, with the clipped ratio of Schulman et al. 2017, "Proximal policy optimization", and
the advantages of Shao et al. 2024, "DeepSeekMath"; tokens count alike, however long their answer is. Prompts whose
answers are all good or all bad teach nothing and are left out. Every step learns ordinary rows too (``--mix``, all of
train.py's losses), so that text, drafts, retrieval and the index stay what they are; good answers teach the draft
block. Rates fall to zero by the clock. The routed experts stay as they are (but ``--experts``): they ship in four bits,
and where the weights come out of such a pack, what is learned beside them is learned beside what ships.

``--aside`` functions are never drawn; how many of them greedy answers get right is written down every few rounds.
``--out`` receives what train.py writes, and ``rounds.jsonl``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint import export
from data import load_stream
from functions import Lexicon
from model import TrainModel
from optimiser import Optimiser
from pack import Encoder
from rounds import Answering, Judge, Limits, Prompts, Text, rate_good, summary
from sample import asks
from torch.nn import functional as F
from train import DRAFT_WEIGHT, INDEX_ROWS, START, Trainer, rate_scale, synchronise

__all__ = ["Policy", "Reinforcer", "pieces"]

WARM_STEPS = 8
JUDGES = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
PIECE_TOKENS = 65_536  # of texts that are computed at once, padding included
PADDED_TO = 64  # what the delta net's chunks ask for
FIGURES = ("policy", "ratio_off", "clipped", "moved")
"""Of a step's tokens: the loss; how far the ratio is from one; the share that is clipped; the divergence, in nats."""


def pieces(texts: Sequence[Text], most: int) -> Iterator[list[Text]]:
    """Texts of like length in equal numbers, as few pieces as keep each, padded, within ``most`` tokens."""
    ordered = sorted(texts, key=len)
    for count in range(1, len(ordered) + 1):
        cuts = [len(ordered) * n // count for n in range(count + 1)]
        found = [ordered[a:b] for a, b in itertools.pairwise(cuts)]
        if count == len(ordered) or all(len(piece) * _padded(piece) <= most for piece in found):
            yield from found
            return


def _padded(texts: Sequence[Text]) -> int:
    """Columns of a piece: the last id of a text is never read."""
    return -(-max(len(text) - 1 for text in texts) // PADDED_TO) * PADDED_TO


class Policy:
    """What the model, as it is, thinks of what was said: by the training forward, one text a row."""

    def __init__(self, model: TrainModel, temperature: float, clip: float) -> None:
        self.model, self.temperature, self.clip = model, temperature, clip
        self.device = model.lm_head.weight.device
        self.none_R = torch.zeros(1, dtype=torch.long, device=self.device)

    def _rows(self, texts: Sequence[Text]) -> torch.Tensor:
        """ids, padded behind, where nothing looks; two columns more than are read."""
        rows = torch.zeros(len(texts), _padded(texts) + 2, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = torch.tensor([*text.ask.ids, *text.said])
        return rows.to(self.device)

    def _places(self, texts: Sequence[Text], ahead: int) -> torch.Tensor:
        """Where, in the flat rows, each said id is told from: so many places before it stands."""
        width = _padded(texts)
        spans = [
            torch.arange(row * width + len(text.ask.ids) - ahead, row * width + len(text) - ahead)
            for row, text in enumerate(texts)
        ]
        return torch.cat(spans).to(self.device)

    def _nats(self, x: torch.Tensor, texts: Sequence[Text], draft: bool, temperature: float) -> torch.Tensor:
        places = self._places(texts, 2 if draft else 1)
        picked = x.flatten(0, 1).index_select(0, places).unsqueeze(0)
        targets = torch.tensor([i for text in texts for i in text.said], device=self.device)
        logits = self.model.logits(picked, draft).squeeze(0) / temperature
        return F.cross_entropy(logits, targets, reduction="none")

    def log_probabilities(self, texts: Sequence[Text]) -> torch.Tensor:
        """Of each said id, one text after another, as they are sampled."""
        x, _ = self.model.hidden(self._rows(texts)[:, :-2], self.none_R)
        return -self._nats(x, texts, False, self.temperature)

    def losses(self, texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(the policy's loss, the drafts' nats of good answers, FIGURES but the first), summed over tokens."""
        rows = self._rows(texts)
        x, _ = self.model.hidden(rows[:, :-2], self.none_R)
        change = -self._nats(x, texts, False, self.temperature) - torch.cat([_before(text) for text in texts])
        ratio = change.exp()
        worth = torch.tensor([text.advantage for text in texts for _ in text.said], device=self.device)
        held = ratio.clamp(1 - self.clip, 1 + self.clip)
        loss = -torch.minimum(ratio * worth, held * worth).sum()
        with torch.no_grad():
            figures = ((ratio - 1).abs(), (ratio * worth > held * worth).float(), ratio - 1 - change)
            kept = torch.stack([figure.sum() for figure in figures])
        good = [number for number, text in enumerate(texts) if text.good]
        if not good:
            return loss, loss.new_zeros(()), kept
        which, those = torch.tensor(good, device=self.device), [texts[number] for number in good]
        y, _ = self.model.drafted(x.index_select(0, which), rows[which, 1:-1], self.none_R)
        width = _padded(those)
        return loss, self._nats(y[:, :width], those, True, 1.0).sum(), kept


def _before(text: Text) -> torch.Tensor:
    assert text.before is not None, "the round wrote them"
    return text.before


class Reinforcer(Trainer):
    """Rounds in place of the trainer's steps; everything before and after is the trainer's."""

    def __init__(self, args: argparse.Namespace, judge: Judge) -> None:
        if (args.state / "state.pt").exists():
            sys.exit(f"{args.state} holds the state of a part, and this one starts from weights: name an empty folder")
        super().__init__(args)
        if self.group.size > 1:
            sys.exit("this part runs as one process: start it with python, not with torchrun")
        if not args.experts:
            for layer in [*self.model.layers, *self.model.mtp.layers]:
                layer.mlp.experts.requires_grad_(False)
            self.optimiser = Optimiser(self.model)
        self.encoder = Encoder(args.tokens)
        vocabulary = json.loads((args.tokens / "tokenizer.json").read_text())["model"]["vocab"]
        words = Lexicon(vocabulary, self.meta["special"])
        limits = Limits(args.chat_limit, args.completion_limit)
        self.answering = Answering(self.model, self.encoder, words, judge, limits, args.seed)
        pairs = asks(load_stream(args.tokens, "chat"), words, self.encoder)
        try:
            self.prompts = Prompts(pairs, args.longest_prompt, args.aside, args.chats, args.seed)
        except ValueError as error:
            sys.exit(str(error))
        self.policy = Policy(self.model, args.temperature, args.clip)
        self.rounds: list[dict[str, Any]] = []
        self.rng = random.Random(args.seed)

    def run(self) -> None:
        """Rounds until none more fits into the seconds, the last measure included."""
        args, start = self.args, time.perf_counter()
        args.total_seconds = min(args.seconds, START + args.wall - start)
        print(json.dumps({"prompts": len(self.prompts), "started_after": round(start - START, 1)}), flush=True)
        kept, took, measuring = start, 0.0, 0.0
        while args.rounds is None or len(self.rounds) < args.rounds:
            began = time.perf_counter()
            if began - start + took + measuring > args.total_seconds:
                break
            entry = self.round(start)
            now = time.perf_counter()
            took, measuring = now - began, entry["sampling_seconds"] if self.prompts.kept else 0.0
            self._tell(entry | {"seconds": round(now - start, 1)})
            if now - kept > args.keep_every:
                kept = now
                export(self.model, args.out)
        if not self.log:
            sys.exit("no step was taken: give more --seconds or --wall, or more --texts a round")
        if self.prompts.kept:
            began = time.perf_counter()
            greedy = summary(self._measured())
            self._tell({"round": "end", "greedy": greedy, "sampling_seconds": round(time.perf_counter() - began, 2)})
        self.progress.seconds = time.perf_counter() - start

    def _measured(self) -> list[Text]:
        kept = self.prompts.kept
        return self.answering.judged(kept, self.answering.said(kept, [0.0] * len(kept)))

    def round(self, start: float) -> dict[str, Any]:
        """Draws, samples, judges, learns; the greedy measure rides with the sampling."""
        args, number = self.args, len(self.rounds)
        batch = [ask for ask in self.prompts.draw(args.texts // args.tries) for _ in range(args.tries)]
        aside = self.prompts.kept if number % args.measure_every == 0 else []
        heat = [args.temperature] * len(batch) + [0.0] * len(aside)
        marks = [time.perf_counter()]
        said = self.answering.said([*batch, *aside], heat)
        marks.append(time.perf_counter())
        judged = self.answering.judged([*batch, *aside], said)
        texts = judged[: len(batch)]
        rate_good(texts, args.tries)
        marks.append(time.perf_counter())
        entry: dict[str, Any] = {"round": number, **summary(texts)}
        if aside:
            entry["greedy"] = summary(judged[len(batch) :])
        learned = [text for text in texts if text.advantage]
        entry["learned_percent"] = round(100 * len(learned) / len(texts), 1)
        if len(learned) >= args.steps:
            entry |= self._learn(learned, start)
        synchronise(self.device)
        marks.append(time.perf_counter())
        spans = [round(b - a, 2) for a, b in itertools.pairwise(marks)]
        return entry | dict(zip(("sampling_seconds", "judging_seconds", "learning_seconds"), spans, strict=True))

    def _learn(self, texts: list[Text], start: float) -> dict[str, Any]:
        """A round's steps, each on its share of the texts; their means."""
        self._remember(texts)
        mean = torch.cat([_before(text) for text in texts]).mean()
        order = self.rng.sample(texts, len(texts))
        first, count = len(self.log), self.args.steps
        for number in range(count):
            self._step(order[len(order) * number // count : len(order) * (number + 1) // count], start)
        done = self.log[first:]
        names = (*FIGURES, "norm", "policy_norm", "main")
        means = {name: round(sum(e[name] for e in done) / count, 5) for name in names}
        return {"log_probability": round(float(mean), 4)} | means | {"rate": done[-1]["rate"]}

    @torch.no_grad()
    def _remember(self, texts: Sequence[Text]) -> None:
        """Keeps how likely each id was to the weights that said it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
            for piece in pieces(texts, PIECE_TOKENS):
                parts = self.policy.log_probabilities(piece).split([len(text.said) for text in piece])
                for text, part in zip(piece, parts, strict=True):
                    text.before = part

    def _step(self, texts: Sequence[Text], start: float) -> None:
        """One step on these texts and on ordinary rows."""
        args, p = self.args, self.progress
        tokens = sum(len(text.said) for text in texts)
        in_good = max(1, sum(len(text.said) for text in texts if text.good))
        totals = torch.zeros(len(FIGURES), device=self.device)
        for piece in pieces(texts, PIECE_TOKENS):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
                loss, draft, figures = self.policy.losses(piece)
            (args.policy * loss / tokens + DRAFT_WEIGHT * draft / in_good).backward()
            totals += torch.cat([loss.detach().view(1), figures]) / tokens
        of_policy = self.optimiser.clip(math.inf)
        out = self._forward(p.step, torch.arange(p.step % INDEX_ROWS, self.length, INDEX_ROWS, device=self.device))
        out.loss.backward()
        norm = self.optimiser.clip(1.0)
        if not math.isfinite(float(norm + out.loss.detach() + totals.sum())):
            sys.exit(f"the loss or a gradient of step {p.step + 1} is not finite: nothing was learned from it")
        p.seconds = time.perf_counter() - start
        rate = args.rate * rate_scale(p.step, p.seconds, args.total_seconds, args.decay, WARM_STEPS)
        self.optimiser.step(rate)
        p.step += 1
        p.tokens += args.rows * self.length + sum(map(len, texts))
        named = dict(zip(FIGURES, totals.tolist(), strict=True)) | {
            "policy_norm": of_policy, "norm": norm, "main": out.main, "draft": out.draft, "balance": out.balance,
            "distil": out.distil, "least_used": out.shares_LE.min() * self.model.c.experts,
        }  # fmt: skip
        entry = {name: round(float(value), 5) for name, value in named.items()}
        self.log.append({"step": p.step, "seconds": round(p.seconds, 1), "rate": round(rate, 5)} | entry)

    def _tell(self, entry: dict[str, Any]) -> None:
        self.rounds.append(entry)
        self.args.out.mkdir(parents=True, exist_ok=True)
        with (self.args.out / "rounds.jsonl").open("w" if len(self.rounds) == 1 else "a") as file:
            file.write(json.dumps(entry) + "\n")
        self._say(entry)

    def described(self) -> dict[str, Any]:
        names = ("texts", "tries", "steps", "temperature", "clip", "policy", "chats", "chat_limit", "completion_limit",
                 "longest_prompt", "decay", "experts", "aside", "seed", "seconds")  # fmt: skip
        rounds = {name: getattr(self.args, name) for name in names}
        rounds["rounds"] = sum(entry["round"] != "end" for entry in self.rounds)
        greedy = [entry["greedy"] for entry in self.rounds if "greedy" in entry]
        return super().described() | {"reinforced": rounds, "greedy_aside": greedy}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by pack.py, with tokenizer.json")
    parser.add_argument("--weights", type=Path, required=True, help="the checkpoint to go on from")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of rounds, loading apart")
    parser.add_argument("--wall", type=float, default=math.inf, help="end the rounds this long after the start")
    parser.add_argument("--rounds", type=int, help="stop after so many (a rehearsal)")
    parser.add_argument("--texts", type=int, default=8192, help="sampled answers of a round")
    parser.add_argument("--tries", type=int, default=8, help="answers of one prompt")
    parser.add_argument("--steps", type=int, default=12, help="of the optimiser in a round, each on its own answers")
    parser.add_argument("--chats", type=float, default=2 / 3, help="share of the prompts that are asked in a chat")
    parser.add_argument("--temperature", type=float, default=0.7, help="of what is sampled, and of what is learned")
    parser.add_argument("--chat-limit", type=int, default=144, help="ids of an answer in a chat, its end included")
    parser.add_argument("--completion-limit", type=int, default=96, help="the same of a completion")
    parser.add_argument("--longest-prompt", type=int, default=160, help="ids of a prompt in a chat")
    parser.add_argument("--clip", type=float, default=0.2, help="how far from one a token's ratio counts")
    parser.add_argument("--policy", type=float, default=2.0, help="factor of the policy's loss beside ordinary rows'")
    parser.add_argument("--aside", type=int, default=512, help="functions that only measure")
    parser.add_argument("--measure-every", type=int, help="rounds between two of those measures (default: 4)")
    parser.add_argument("--judges", type=int, default=JUDGES, help="processes that judge (0: none)")
    parser.add_argument("--rate", type=float, default=0.1, help="factor of both learning rates")
    parser.add_argument("--decay", type=float, default=0.6, help="share of the time in which the rate falls")
    parser.add_argument("--experts", action="store_true", help="learn the routed experts too, where steps as small as "
                        "these are lost when they are rounded to four bits")  # fmt: skip
    parser.add_argument("--rows", type=int, default=5, help="ordinary rows of a step")
    parser.add_argument("--mix", default="code=2,chat=1,functions=1,retrieval=1", help="what they are; see train.py")
    parser.add_argument("--stutter", type=float, default=0.2, help="as of train.py")
    parser.add_argument("--longest", type=int, default=112, help="as of train.py")
    parser.add_argument("--length", type=int, default=4096, help="of an ordinary row")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--eval-windows", type=int, help="held-out windows to measure (default: all)")
    parser.add_argument("--generate", action="store_true", help="measure completions and chats too")
    parser.add_argument("--keep-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--cpu", action="store_true")
    # What train.py can do and this part does not.
    parser.set_defaults(tiny=False, turn=1.0, answers=None, wide=False, compiled=False, guard=False, total_seconds=0.0)
    args = parser.parse_args()
    if args.aside == 0 and args.measure_every is not None:
        sys.exit("--measure-every means nothing with --aside 0: leave it out")
    args.measure_every = 4 if args.measure_every is None else args.measure_every
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    """Ends in one line where a number makes no sense."""
    for name in ("texts", "tries", "steps", "chat_limit", "completion_limit", "measure_every", "rows", "temperature",
                 "clip", "policy", "rate", "decay", "seconds"):  # fmt: skip
        if not getattr(args, name) > 0:
            sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: give a number above zero")
    if args.rounds is not None and args.rounds < 1:
        sys.exit(f"--rounds {args.rounds}: give at least one")
    if args.tries < 2 or args.texts % args.tries:
        sys.exit(f"--texts {args.texts} --tries {args.tries}: give at least two tries, and a multiple of them as texts")
    if not 0 <= args.chats <= 1:
        sys.exit(f"--chats {args.chats}: give a share, from 0 to 1")
    if not args.clip < 1:
        sys.exit(f"--clip {args.clip}: give a number below 1")
    if args.aside < 0 or args.judges < 0:
        sys.exit("--aside and --judges take no number below zero")
    for name, holds in (("tokens", "meta.json"), ("weights", "config.json")):
        folder = getattr(args, name)
        if not (folder / holds).exists():
            sys.exit(f"--{name} {folder}: there is no {holds} in it")


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is asked for
    args = arguments()
    with Judge(args.judges) as judge:
        trainer = Reinforcer(args, judge)
        trainer.run()
    trainer.finish()


if __name__ == "__main__":
    main()
