"""Where a training step's time goes on a GPU: a minute of measurements before a part is paid for.

    python tools/train/probe.py --tokens DIR

Prints, as JSON lines, milliseconds of the expert layer as wide and as grouped products, of whole compiled steps, and
of their dearest kernels. Not part of training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from model import TrainModel
from torch.profiler import ProfilerActivity, profile
from train import Trainer
from train import arguments as train_arguments


def milliseconds(work: Callable[[], object], runs: int = 5) -> float:
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / runs * 1000


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def experts_both_ways(model: TrainModel, rows: int, length: int) -> None:
    moe = model.layers[0].mlp
    trained = moe.grouped
    x = torch.randn(rows, length, model.c.hidden, device="cuda", requires_grad=True)

    def work() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return moe(x.bfloat16())[0]

    for name in ("wide", "grouped"):
        moe.grouped = name == "grouped"
        call = torch.compile(work, dynamic=False)
        try:
            taken = milliseconds(lambda call=call: call().float().sum().backward())
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            say(experts=name, error=str(error)[:500])
        else:
            say(experts=name, ms=taken)
    moe.grouped = trained


def kernels(trainer: Trainer, form: str) -> None:
    start = time.perf_counter()
    trainer.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    taken = milliseconds(lambda: trainer.step(), runs=8)
    tokens = trainer.args.rows * trainer.length
    say(step=form, first_seconds=first, ms=taken, tokens_per_second=tokens / taken * 1000)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        trainer.step()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in events) / 1000
    say(step=form, device_ms=busy, kernels=sum(e.count for e in events))
    for e in events[:28]:
        say(kernel=e.key[:110], ms=round(e.self_device_time_total / 1000, 2), count=e.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.argv[1:] = ["--tokens", str(args.tokens), "--state", "/nonexistent", "--out", "/nonexistent"]
    sys.argv += ["--seconds", "60", "--total-seconds", "600", "--rows", str(args.rows)]
    start = time.perf_counter()
    trainer = Trainer(train_arguments())
    say(setup_seconds=time.perf_counter() - start, device=torch.cuda.get_device_name(), torch=torch.__version__)
    experts_both_ways(trainer.model, args.rows, trainer.length)
    trainer.model.compile_blocks()
    try:
        kernels(trainer, "compiled")
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        say(step="compiled", error=str(error)[:1500])
        with torch.compiler.set_stance("force_eager"):
            kernels(trainer, "eager")
    say(peak_gib=torch.cuda.max_memory_allocated() / 2**30)


if __name__ == "__main__":
    main()
