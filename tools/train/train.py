"""Trains the small model: one command a part, time-boxed, resumable, evaluated at its end.

    python tools/train/train.py --tokens DIR --state DIR --out DIR --seconds 430 --total-seconds 860

``--state`` keeps the whole state (weights in FP32, momenta, step) where the next part finds it; ``--out`` receives the
BF16 checkpoint, ``log.jsonl``, ``loss.png`` and ``figures.json``. If ``--state`` is empty and ``--weights`` names an
exported checkpoint, the run goes on from those weights with fresh momenta. The schedule is warm-up by steps, then a
constant rate, then a decay to zero over the last share of ``--total-seconds`` of training, by the clock. ``--mix`` says
what the rows of a batch are, ``--stutter`` how many bodies of whole documents repeat themselves (functions.py),
``--longest`` how long they may be, ``--turn`` what their turns weigh (data.py), ``--answers`` where kept answers are.
Several GPUs of one machine share the batch: ``torchrun --nproc-per-node 4 tools/train/train.py ...``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agree
import numpy as np
import torch
from checkpoint import config_of, export, import_weights
from data import Batches, load_stream, read_mix
from group import Group
from measure import Measures
from model import Config, Outputs, TrainModel
from optimiser import Optimiser
from tokenizers import Tokenizer

WARM_STEPS = 30
DECAY_SHARE = 0.35
DRAFT_WEIGHT = 0.3
START = time.perf_counter()  # near enough the process's: --wall counts from here
GUARDED_STEPS = 300
GONE_WRONG = 3  # the exit status of a run that _guard ended
LARGEST_NORM = 50.0
LARGEST_BALANCE = 1.5
JUDGED_STEP, JUDGED_LOSS = 150, 5.5  # a model that only knows how frequent tokens are stays near 6.8
SAMPLES = 24  # completions that are printed
INDEX_ROWS = 16  # one row in sixteen teaches the index, another one each step

TINY: dict[str, Any] = {
    "hidden": 96,
    "layers": 4,
    "heads": 2,
    "head_width": 32,
    "kv_heads": 1,
    "delta_key_heads": 2,
    "delta_value_heads": 3 * 2,
    "delta_width": 16,
    "experts": 12,
    "expert_width": 64,
    "shared_width": 64,
    "rank": 16,
    "ple_width": 64,
    "ngram_base": 1024,
    "index_width": 32,
    "index_budget": 64,
    "context": 256,
}


@dataclass
class Progress:
    """What a resumed part needs beside weights and momenta."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


def rate_scale(
    step: int, seconds: float, total: float, decay: float = DECAY_SHARE, warm_steps: int = WARM_STEPS
) -> float:
    """Warm-up, hold, linear decay to zero over the last share ``decay``."""
    left = max(0.0, total - seconds) / (decay * total)
    return min(1.0, (step + 1) / warm_steps) * min(1.0, left)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Trainer:
    """One run: model, optimiser, batches, log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.group = Group(args.cpu)
        self.device = self.group.device
        if args.rows % self.group.size:
            sys.exit(f"{args.rows} rows do not divide by {self.group.size} processes: give --rows a multiple")
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients are not deterministic, flash attention's are
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        meta = json.loads((args.tokens / "meta.json").read_text())
        config = config_of(meta)
        if args.tiny:
            config = Config(**{**config.to_dict(), "eos": config.eos, **TINY})
        self.length = min(args.length, config.context)
        self.model = TrainModel(config)
        self.model.initialise(args.seed)
        self.model.to(self.device)
        self.progress = Progress()
        state = args.state / "state.pt"
        self.before: dict[str, Any] | None = None  # the figures of the part whose weights this one goes on from
        if args.weights and (args.weights / "figures.json").exists():
            self.before = json.loads((args.weights / "figures.json").read_text())
        if not state.exists() and args.weights:
            import_weights(self.model, args.weights)
        self.optimiser = Optimiser(self.model)
        if state.exists():
            self._load(state)
        try:
            mix = read_mix(args.mix, args.rows)
            self.batches = Batches(args.tokens, mix, self.length, args.seed, self.group, args.stutter, args.longest,
                                   args.turn, args.answers)  # fmt: skip
        except ValueError as error:
            sys.exit(str(error))
        self.meta = meta
        self.log: list[dict[str, Any]] = []
        self.low = self.device.type == "cuda"
        self.model.group_experts(self.low and not args.wide)
        if args.compiled:
            self.model.compile_blocks()
        if args.guard:
            self._agree()

    def _agree(self) -> None:
        """Compares gradients of every kind of block and takes remedies: what both kinds of layer have wrong is laid to
        the grouped experts, what one kind has wrong to its compilation, what stays wrong to TF32."""
        picked = torch.arange(0, self.length, INDEX_ROWS, device=self.device)
        start, window = time.perf_counter(), self.group.same(self.batches.batch(self.progress.step).windows)
        for form in ("as trained", "first remedy", "second remedy", "FP32 products"):
            answers = agree.compare(self.model, window, picked, self.low)
            for a in answers:
                self._say({"form": form} | vars(a) | {"good": a.good})
            wrong = {a.kind for a in answers if not a.good}
            if not wrong:
                self._say({"agree_seconds": round(time.perf_counter() - start, 1)})
                return
            if self.model.layers[0].mlp.grouped and wrong >= {"delta", "attention"}:
                self.model.group_experts(False)
                wrong -= {"delta", "attention"}
            elif form == "second remedy":
                torch.set_float32_matmul_precision("highest")
            for kind in wrong:
                self.model.leave_uncompiled(kind)
        sys.exit("gradients are wrong in every form: nothing was trained")

    def _say(self, facts: dict[str, Any]) -> None:
        """One JSON line, of the first process alone."""
        if self.group.rank == 0:
            print(json.dumps(facts), flush=True)

    def _load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load(state["optimiser"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        self.args.state.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state(),
            "progress": vars(self.progress),
        }
        torch.save(state, self.args.state / "state.part")
        (self.args.state / "state.part").replace(self.args.state / "state.pt")

    def _forward(self, step: int, picked: torch.Tensor) -> Outputs:
        batch = self.batches.batch(step)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.low):
            return self.model(batch.windows, picked, DRAFT_WEIGHT, batch.weights)

    def step(self) -> dict[str, torch.Tensor]:
        """One step; its figures stay on the device."""
        p = self.progress
        picked = torch.arange(p.step % INDEX_ROWS, self.length, INDEX_ROWS, device=self.device)
        out = self._forward(p.step, picked)
        out.loss.backward()
        least = out.shares_LE.min() * self.model.c.experts  # of this process's rows
        names = ("main", "draft", "balance", "distil", "least_used")
        figures = (out.main, out.draft, out.balance, out.distil, least)
        figures = self.group.average(self.optimiser.parameters, figures)
        norm = self.optimiser.clip(1.0)
        self.optimiser.step(self.args.rate * rate_scale(p.step, p.seconds, self.args.total_seconds, self.args.decay))
        p.step += 1
        p.tokens += self.args.rows * self.length
        return dict(zip(names, figures, strict=True)) | {"norm": norm}

    def run(self) -> None:
        """Steps until the part's seconds are spent (the first step, with its compilation, included)."""
        args, p = self.args, self.progress
        start = time.perf_counter()
        before = p.seconds
        pending: list[tuple[int, float, dict[str, torch.Tensor]]] = []
        mark_time, mark_tokens = start, p.tokens
        length = self.group.agreed(min(args.seconds, START + args.wall - start))
        if args.last:
            args.total_seconds = before + length
        kept, spent = start, 0.0
        while spent < length and (args.steps is None or p.step < args.steps):
            figures = self.step()
            pending.append((p.step, p.seconds, figures))
            if p.step % 10 == 0 or p.step == 1:
                synchronise(self.device)
                now = time.perf_counter()
                rate = (p.tokens - mark_tokens) / (now - mark_time)
                mark_time, mark_tokens = now, p.tokens
                self._flush(pending, rate)
                spent = self.group.agreed(now - start)
                p.seconds = before + spent
                if now - kept > args.keep_every and self.group.rank == 0:
                    kept = now
                    self.save()
                    export(self.model, args.out)
            elif self.group.size == 1:
                spent = time.perf_counter() - start
        synchronise(self.device)
        self._flush(pending, 0.0)
        p.seconds = before + self.group.agreed(time.perf_counter() - start)

    def _flush(self, pending: list[tuple[int, float, dict[str, torch.Tensor]]], rate: float) -> None:
        for step, seconds, figures in pending:
            entry = {"step": step, "seconds": round(seconds, 1)} | {k: round(float(v), 5) for k, v in figures.items()}
            if not math.isfinite(entry["main"]):
                sys.exit(f"the loss of step {step} is not finite")
            self.log.append(entry)
            if self.args.guard:
                self._guard()
            if step <= 20 or step % 50 == 0:
                self._say(entry | {"tokens_per_second": round(rate)})
        pending.clear()

    def _guard(self) -> None:
        """Ends a run that has gone wrong, by the means of its last ten steps."""
        recent = self.log[-10:]
        step = recent[-1]["step"]
        if len(recent) < 10 or step > GUARDED_STEPS:
            return
        means = {k: sum(e[k] for e in recent) / 10 for k in ("norm", "balance", "main")}
        bounds = {"norm": LARGEST_NORM, "balance": LARGEST_BALANCE}
        if step >= JUDGED_STEP:
            bounds["main"] = JUDGED_LOSS
        for name, bound in bounds.items():
            if not means[name] <= bound:
                print(f"stopped at step {step}: {name} is {means[name]:.3f}, more than {bound}", flush=True)
                self._blame()
                sys.exit(GONE_WRONG)

    def _blame(self) -> None:
        """Prints which tensors have the largest gradients on the next batch."""
        picked = torch.arange(0, self.length, INDEX_ROWS, device=self.device)
        self._forward(self.progress.step, picked).loss.backward()
        found = {name: float(p.grad.norm()) for name, p in self.model.named_parameters() if p.grad is not None}
        for name in sorted(found, key=lambda n: -found[n])[:12]:
            self._say({"tensor": name, "norm": found[name]})

    def described(self) -> dict[str, Any]:
        """What this part did, for its figures."""
        args = self.args
        return {
            "processes": self.group.size,
            "mix": self.batches.mix,
            "stutter": args.stutter,
            "longest": args.longest,
            "turn": args.turn,
            "rate": args.rate,
        }

    def finish(self) -> None:
        """Saves, exports, evaluates, plots."""
        args, start = self.args, time.perf_counter()
        args.out.mkdir(parents=True, exist_ok=True)
        self.save()
        hashes = export(self.model, args.out)
        with (args.state / "log.jsonl").open("a") as file:
            file.writelines(json.dumps(e) + "\n" for e in self.log)
        log = [json.loads(line) for line in (args.state / "log.jsonl").read_text().splitlines()]
        (args.out / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
        figures: dict[str, Any] = vars(self.progress) | self.described()
        figures |= {
            "before": self.before,
            "parameters": sum(q.numel() for q in self.model.parameters()),
            "epochs_of_code": round(self.batches.epochs(self.progress.step), 2),
            "sha256": hashes,
            "first_20_losses": [e["main"] for e in log[:20]],
        }
        if self.device.type == "cuda":
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(figures), flush=True)
        heldout = load_stream(args.tokens, "heldout")
        tokenizer = Tokenizer.from_file(str(args.tokens / "tokenizer.json"))
        measures = Measures(self.model, self.meta, heldout, tokenizer, args.eval_windows)
        wanted = [measures.text, measures.retrieval]
        for measure in wanted + ([measures.completions, measures.chats] if args.generate else []):
            found = measure()
            figures |= found
            print(json.dumps(found), f"{time.perf_counter() - start:.1f} s", flush=True)
            (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps({"samples": measures.samples[:SAMPLES]}), flush=True)
        plot(log, args.out / "loss.png")


def plot(log: list[dict[str, Any]], path: Path) -> None:
    """The loss curve; left out where there was no step, and where matplotlib is not installed."""
    if not log:
        return
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    steps = np.array([e["step"] for e in log])
    for name in ("main", "draft", "distil"):
        values = np.array([e[name] for e in log])
        width = max(1, min(50, len(values) // 10))
        smooth = np.convolve(values, np.ones(width) / width, mode="valid")
        axes.plot(steps[width - 1 :], smooth, label={"main": "next token", "draft": "draft", "distil": "index"}[name])
    axes.set(xlabel="step", ylabel="nats a token", ylim=(0, 6))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by pack.py, with tokenizer.json")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="an exported checkpoint to go on from when --state is empty")
    parser.add_argument("--seconds", type=float, required=True, help="of this part")
    parser.add_argument("--total-seconds", type=float, required=True, help="of all parts; sets the decay")
    parser.add_argument("--steps", type=int, help="stop at this step (a rehearsal)")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--eval-windows", type=int, help="held-out windows to measure (default: all)")
    parser.add_argument("--generate", action="store_true", help="measure completions and chats too")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of both learning rates")
    parser.add_argument("--decay", type=float, default=DECAY_SHARE, help="share of the time in which the rate falls")
    parser.add_argument(
        "--mix", help="rows of a batch, as code=8,chat=11,functions=11,retrieval=2 (default: no functions)"
    )
    parser.add_argument("--answers", type=Path, help="a file of sample.py, for answers=ROWS in --mix")
    parser.add_argument("--stutter", type=float, default=0.0, help="share of bodies that repeat a piece, unlearned")
    parser.add_argument("--longest", type=int, help="tokens of a body in whole documents, at most")
    parser.add_argument("--turn", type=float, default=1.0, help="what a body's first token, the one that leaves a "
                        "repetition, and an end token count in whole documents")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile the blocks; see docs/log.md on their gradients")
    parser.add_argument("--wide", action="store_true", help="experts as wide products on a GPU too")
    parser.add_argument("--guard", action="store_true", help="compare gradients first; stop a run that goes wrong")
    parser.add_argument("--wall", type=float, default=math.inf, help="stop training this long after the start")
    parser.add_argument("--last", action="store_true", help="the decay ends with this part, whatever --total-seconds")
    parser.add_argument("--keep-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--tiny", action="store_true", help="a model a tenth as large, for a rehearsal")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    args.compiled = torch.cuda.is_available() and args.compile and not args.cpu
    return args


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is asked for
    trainer = Trainer(arguments())
    trainer.run()
    trainer.group.close()
    if trainer.group.rank == 0:
        trainer.finish()


if __name__ == "__main__":
    main()
