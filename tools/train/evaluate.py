"""Measures a finished checkpoint on this PC with the project's own engine: one command, a table, one record.

    python tools/train/evaluate.py --checkpoint DIR --tokens DIR [--out benchmarks/results] [--machine cpu2]

Packs the checkpoint in every format of ``ship.FORMATS`` (or takes ``--packs``), measures each on the same fixed
sample of held-out windows, and the shipped one on completions, chats, drafts and retrieval; beside it xz and a 5-gram
model. Every figure is on held-out packages. ``--quick`` is a rehearsal in a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import NgramModel, xz_bits_per_byte
from data import RetrievalMaker, load_stream
from measure import cut_at_dedent, repeats
from pack import parses
from ship import FORMATS, make_pack
from subject import Subject

from strata.benchmark_record import Figure, Record, record_path
from strata.kernels.bench import machine as machine_in_numbers

__all__ = ["GOALS", "Evaluation", "Sizes", "checkpoint_sha256", "make_packs"]

SEED = 2026
CONTEXT = 4096


@dataclass(frozen=True)
class Sizes:
    """How much is measured. ``windows`` of ``CONTEXT`` tokens, the first ``compared`` of them in every format;
    ``questions`` a retrieval document."""

    windows: int = 8
    compared: int = 4
    prompts: int = 100
    documents: int = 12
    questions: int = 8
    baseline_tokens: int | None = None  # of the training stream, for the 5-gram model


QUICK = Sizes(windows=1, compared=1, prompts=3, documents=1, baseline_tokens=1_000_000)

# (figure, what the goal says, whether it is met)
GOALS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("bits_per_byte_shipped", "<= 1.1, aim 0.95", lambda v: v <= 1.1),
    ("completions_parse", ">= 85 of 100", lambda v: v >= 85),
    ("completions_loop", "<= 5 of 100", lambda v: v <= 5),
    ("chat_good", ">= 90 of 100", lambda v: v >= 90),
    ("draft_acceptance", ">= 60 %", lambda v: v >= 60),
    ("retrieval", ">= 90 %", lambda v: v >= 90),
    ("sparse_over_dense", "within 1 %", lambda v: abs(v) <= 1),
    ("nvfp4_over_bf16", "within 3 %", lambda v: v <= 3),
)


def checkpoint_sha256(folder: Path) -> dict[str, str]:
    """{file: sha256} of the weights."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("model*.safetensors"))}


def make_packs(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """A pack of each format below ``folder``, under a name of these weights; one that is there is kept."""
    weights = hashlib.sha256("".join(checkpoint_sha256(checkpoint).values()).encode()).hexdigest()
    packs = {}
    for name, formats in FORMATS.items():
        packs[name] = folder / weights[:12] / name
        if not packs[name].exists():
            make_pack(checkpoint, packs[name], formats)
    return packs


class Evaluation:
    """The measures of one set of packs. ``figures`` fills as they run; ``samples`` keeps texts for people."""

    def __init__(self, packs: dict[str, Path], tokens: Path, sizes: Sizes) -> None:
        self.packs, self.tokens, self.sizes = packs, tokens, sizes
        self.meta: dict[str, Any] = json.loads((tokens / "meta.json").read_text())
        self.heldout = load_stream(tokens, "heldout")
        self.figures: dict[str, Figure] = {}
        self.samples: dict[str, list[dict[str, Any]]] = {"completions": [], "chats": []}
        self.end: int = self.meta["special"]["<|endoftext|>"]
        with Subject(packs["shipped"]) as subject:
            tokenizer = subject.opened.text.tokenizer
            self.bytes_of = [b"" if i == self.end else tokenizer.token_bytes(i) for i in range(8192)]
        starts = np.random.default_rng(SEED).permutation((len(self.heldout) - 1) // CONTEXT)[: sizes.windows]
        self.windows = [self.heldout[s * CONTEXT : (s + 1) * CONTEXT + 1].tolist() for s in starts]
        self.window_bytes = [sum(len(self.bytes_of[i]) for i in window[1:]) for window in self.windows]

    def run(self, wanted: Sequence[str] = ()) -> None:
        """All measures, or those named, with a line of time after each."""
        for measure in (self.formats, self.drafts_and_sparse, self.retrieval, self.completions, self.chats,
                        self.baselines):  # fmt: skip
            if not wanted or measure.__name__ in wanted:
                began = time.perf_counter()
                measure()
                print(f"{measure.__name__}: {time.perf_counter() - began:.0f} s", flush=True)

    def formats(self) -> None:
        """Bits per byte in each format, and what activations in 8 bits cost: ratios are of the same windows."""
        nats: dict[str, tuple[float, ...]] = {}
        for name, path in self.packs.items():
            windows = self.windows if name in ("bf16", "shipped") else self.windows[: self.sizes.compared]
            with Subject(path) as subject:
                nats[name] = subject.text(windows).nats
                if name in ("q8_0", "nvfp4", "shipped"):
                    compared = self.windows[: self.sizes.compared]
                    exact = subject.text(compared, experts=subject.float_experts()).nats
                    self._keep_bits(f"{name}_float_activations", exact)
                    self._keep_ratio(f"activations_cost_{name}", nats[name], exact)
            self._keep_bits(name, nats[name])
            if name != "bf16":
                self._keep_ratio(f"{name}_over_bf16", nats[name], nats["bf16"])

    def drafts_and_sparse(self) -> None:
        """First-draft acceptance, sparse against dense, and how evenly experts are used."""
        compared = self.windows[: self.sizes.compared]
        with Subject(self.packs["shipped"]) as subject:
            sparse = subject.text(compared, drafts=True)
            dense = subject.text(compared, model=subject.dense())
            self._keep("draft_acceptance", 100 * sparse.agreed / sparse.drafted, "%", runs=sparse.drafted)
            self._keep_ratio("sparse_over_dense", sparse.nats, dense.nats)
            picks = subject.picks(self.windows[:1])
            even = picks.sum(1, keepdim=True) / picks.shape[1]
            self._keep("expert_use_least", float((picks / even).min()), "of an even share")
            self._keep("expert_use_most", float((picks / even).max()), "of an even share")

    def retrieval(self) -> None:
        """Questions at 1,024 to 4,096 tokens answered exactly, by the selected blocks and by all."""
        maker, rng = RetrievalMaker(self.meta, self.heldout), np.random.default_rng(5)
        right, asked, lengths = {"sparse": 0, "dense": 0}, 0, []
        with Subject(self.packs["shipped"]) as subject:
            budget = subject.opened.reader.config["text_config"]["indexer_budget"]
            models = {"sparse": None, "dense": subject.dense()}
            for _ in range(self.sizes.documents):
                length = int(rng.integers(CONTEXT // 4, CONTEXT - 16))
                ids, answers = maker.document(rng, length, self.sizes.questions)
                places = find_answers(ids, answers, maker.pieces["is"])
                lengths.append(len(ids))
                for name, model in models.items():
                    said = subject.said(ids, model)
                    good = [said[at - 1 : at - 1 + len(a)] == a for at, a in zip(places, answers, strict=True)]
                    right[name] += sum(good)
                asked += len(answers)
        self._keep("retrieval", 100 * right["sparse"] / asked, "%", context_tokens=max(lengths), runs=asked)
        self._keep("retrieval_dense", 100 * right["dense"] / asked, "%", context_tokens=max(lengths), runs=asked)
        self._keep("retrieval_index_budget", budget, "tokens")

    def completions(self) -> None:
        """``def`` lines with docstring: how many bodies parse when cut at the dedent, how many loop."""
        prompts = self.meta["completions"][: self.sizes.prompts]
        good = loops = 0
        with Subject(self.packs["shipped"]) as subject:
            for prompt in prompts:
                ids, body, parsed = complete(subject, prompt["ids"], prompt["text"], self.end)
                good, loops = good + parsed, loops + repeats(ids)
                self.samples["completions"].append(
                    {"package": prompt["package"], "prompt": prompt["text"], "body": body, "parses": parsed}
                )
        self._keep("completions_parse", 100 * good / len(prompts), "of 100", runs=len(prompts))
        self._keep("completions_loop", 100 * loops / len(prompts), "of 100", runs=len(prompts))

    def chats(self) -> None:
        """The same functions asked for in a chat: how many answers end by themselves within 256 ids and are code."""
        prompts = self.meta["completions"][: self.sizes.prompts]
        ended = code = both = 0
        with Subject(self.packs["shipped"]) as subject:
            for prompt in prompts:
                ids, answer, has_ended, is_code = ask(subject, prompt["text"])
                assert ids == prompt["chat_ids"], "the template writes what the trainer wrote"
                ended, code, both = ended + has_ended, code + is_code, both + (has_ended and is_code)
                self.samples["chats"].append({"prompt": prompt["text"], "answer": answer, "code": is_code})
        for name, count in (("chat_end", ended), ("chat_code", code), ("chat_good", both)):
            self._keep(name, 100 * count / len(prompts), "of 100", runs=len(prompts))

    def baselines(self) -> None:
        """xz over the whole held-out text, and a 5-gram model of the training code on the same windows."""
        text = b"".join(self.bytes_of[i] for i in self.heldout.tolist())
        self._keep("bits_per_byte_xz", xz_bits_per_byte(text), "bits/byte")
        training = load_stream(self.tokens, "code-0", "code-1")[: self.sizes.baseline_tokens]
        context = [self.end] * 3
        self._keep_bits("5gram", NgramModel(training).nats([[*context, *window] for window in self.windows]))

    def _keep_bits(self, name: str, nats: Sequence[float]) -> None:
        """Of the first windows, as many as were measured."""
        measured = sum(self.window_bytes[: len(nats)])
        self._keep(f"bits_per_byte_{name}", sum(nats) / math.log(2) / measured, "bits/byte", runs=len(nats))

    def _keep_ratio(self, name: str, nats: Sequence[float], base: Sequence[float]) -> None:
        """By how many percent the first is more, over the windows that both have."""
        count = min(len(nats), len(base))
        self._keep(name, 100 * (sum(nats[:count]) / sum(base[:count]) - 1), "%", runs=count)

    def _keep(self, name: str, value: float, unit: str, **more: Any) -> None:
        if name not in self.figures:
            more.setdefault("context_tokens", CONTEXT if unit in ("bits/byte", "%") else None)
            self.figures[name] = Figure(round(float(value), 5), unit, **more)


def find_answers(ids: list[int], answers: list[list[int]], marker: list[int]) -> list[int]:
    """Where each answer begins: the checks stand at the end of the document, in order, each after ``marker``."""
    places, end = [], len(ids)
    for answer in reversed(answers):
        wanted = [*marker, *answer]
        while ids[end - len(wanted) : end] != wanted:
            end -= 1
            assert end >= len(wanted), "every question stands in its document"
        places.append(end - len(answer))
        end -= len(wanted)
    return places[::-1]


def complete(subject: Subject, prompt: Sequence[int], text: str, end: int) -> tuple[list[int], str, bool]:
    """(ids, body, whether it parses) of a greedy completion of 96 ids, cut at the dedent; ``text`` is the prompt's."""
    decode = subject.opened.text.tokenizer.decode
    ids = subject.greedy(list(prompt), 96, lambda ids: ids[-1] == end or is_dedented(decode(ids)))
    body = cut_at_dedent(decode([i for i in ids if i != end]), ended=ids[-1] == end)
    return ids, body, bool(body.strip()) and parses(text + "\n" + body)


def ask(subject: Subject, prompt: str) -> tuple[list[int], str, bool, bool]:
    """(the prompt's ids, the answer, whether it ended within 256 ids, whether it is Python with a function)."""
    text = subject.opened.text
    ends, ids = set(text.end_ids), list(text.chat([{"role": "user", "content": prompt}]).ids)
    found = subject.greedy(ids, 256, lambda ids: ids[-1] in ends)
    answer = text.tokenizer.decode([i for i in found if i not in ends])
    return ids, answer, found[-1] in ends, parses(answer) and "def " in answer


def is_dedented(body: str) -> bool:
    """Whether a complete line of the text is not indented: what follows is no longer the function."""
    return any(line.strip() and not line.startswith((" ", "\t")) for line in body.split("\n")[:-1])


def table(figures: dict[str, Figure]) -> str:
    """The figures with their goals, for people."""
    goals = {name: (words, met) for name, words, met in GOALS}
    lines = []
    for name, figure in figures.items():
        words, met = goals.get(name, ("", None))
        verdict = "" if met is None else f"   goal {words}: {'met' if met(figure.value) else 'MISSED'}"
        lines.append(f"{name:<42}{figure.value:>12.4f} {figure.unit}{verdict}")
    return "\n".join(lines)


def to_record(evaluation: Evaluation, hashes: dict[str, str]) -> Record:
    sample = {
        "windows": len(evaluation.windows),
        "window_tokens": CONTEXT,
        "sample_bytes": sum(evaluation.window_bytes),
        "seed": SEED,
        "checkpoint_sha256": hashes,
    }
    return Record("python tools/train/evaluate.py", machine_in_numbers() | sample, evaluation.figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="BF16 weights, config.json, tokenizer")
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by pack.py")
    parser.add_argument("--packs", type=Path, help="where packs of all formats are kept (default: nowhere)")
    parser.add_argument("--only", nargs="*", default=(), help="names of measures")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--samples", type=Path, help="write completions and chats here, as JSON")
    parser.add_argument("--out", type=Path, help="keep the record in OUT/<machine>/small.json")
    parser.add_argument("--machine", default="this-pc")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the native operations have threads of their own; torch's would fight them
    sizes = QUICK if args.quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        packs = make_packs(args.checkpoint, args.packs or Path(scratch))
        evaluation = Evaluation(packs, args.tokens, sizes)
        evaluation.run(args.only)
    print(table(evaluation.figures))
    record = to_record(evaluation, checkpoint_sha256(args.checkpoint))
    if args.samples:
        args.samples.write_text(json.dumps(evaluation.samples, indent=1) + "\n")
    if args.out:
        record.write(record_path(args.out, args.machine, "small"))
    print(record.line())


if __name__ == "__main__":
    main()
