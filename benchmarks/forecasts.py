"""What a model does a second in every placement, over what the forecast said it would: forecasts.json.

    python benchmarks/forecasts.py --machine cpu2

Makes a random model of real widths, then in each loop measures the machine and runs every placement, so that a busy
moment meets rates and runs alike. A figure is what was measured, or that over what was predicted, 1 being right. Prints
one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from strata.benchmark_record import Figure, Record, measured, record_path
from strata.checkpoint.random_model import write_random_pack
from strata.config import Requested
from strata.engine.calibration import measure_rates
from strata.engine.plan_subject import find_subject
from strata.engine.runtime import kv_format
from strata.engine.speed_bench import measure_speed
from strata.errors import StrataError
from strata.kernels.bench import machine
from strata.models import find
from strata.models.known_shapes import known_config
from strata.option_values import Prefill
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer_files import tokenizer_files

RESULTS = Path(__file__).resolve().parent / "results"
# The widths of qwen3-30b with fewer layers, experts and words: 1.3 GB of experts, 0.3 GB dense.
CHANGES = {"num_hidden_layers": 8, "num_experts": 64, "vocab_size": 32768, "eos_token_id": [258, 256]}
NUM_EXPERTS = CHANGES["num_hidden_layers"] * CHANGES["num_experts"]  # type: ignore[operator]
GIB = 1 << 30
BUDGET_GIB = 0.6  # about half of the experts
LITTLE_RAM_GIB = 0.75  # so that reads of the file go past the page cache
PROMPT, DECODE = 512, 32
ARMS: dict[str, dict[str, Any]] = {
    "arena": {},
    "mapped": {"mmap_experts": True},
    "budget": {"resident_budget_gib": BUDGET_GIB},
    "slots": {"vram_gib": 4.0, "expert_cache": NUM_EXPERTS // 4, "adapt_every": 0},
    "swaps": {"vram_gib": 4.0, "expert_cache": NUM_EXPERTS // 4},
    "resident": {"vram_gib": 4.0, "expert_cache": NUM_EXPERTS // 4, "resident_experts": True, "adapt_every": 0},
    "file": {"resident_budget_gib": 1e-6},
    "drive": {"resident_budget_gib": 1e-6, "ram_gib": LITTLE_RAM_GIB},
}


def make_model(folder: Path) -> Path:
    """The pack in ``folder``, made there unless it is there already."""
    pack = folder / "forecast-model"
    if not pack.exists():
        words = folder / "tokenizer"
        words.mkdir(exist_ok=True)
        byte_tokenizer(words)
        shape = {**known_config("qwen3-30b"), **CHANGES}
        write_random_pack(pack, shape, find, seed=1, tokenizer_files=tuple(tokenizer_files(words)))
    return pack


def run(pack: Path, arms: list[str], loops: int, runs: int) -> dict[str, Figure]:
    asked = Requested(model=str(pack), max_context=1024, prefill=Prefill(PROMPT, is_auto=False))
    subject = find_subject(asked.model, kv_format(asked))
    names = [f"{kind}_{arm}" for kind in ("decode", "prompt") for arm in arms]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    rates_found: dict[str, list[float]] = {name: [] for name in names}
    spans = []
    for _ in range(loops):
        began = time.perf_counter()
        rates = measure_rates(asked)
        spans.append(time.perf_counter() - began)
        for arm in arms:
            requested = dataclasses.replace(asked, **ARMS[arm])
            found = measure_speed(requested, subject, rates, prompt=PROMPT, tokens=DECODE, runs=runs, greedy=False)
            for kind, speeds, predicted, parts in (
                ("decode", found.decode, found.expected.decode_rate_over(DECODE), found.expected.decode_parts),
                ("prompt", found.prompt, found.expected.prompt_rate, found.expected.prompt_parts),
            ):
                speed = statistics.median(speeds)
                rates_found[f"{kind}_{arm}"].append(speed)
                ratios[f"{kind}_{arm}"].append(speed / predicted)
                where = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in parts.items() if seconds)
                said = f"{kind} {arm}: {speed:.4g} tok/s, predicted {predicted:.4g}: {speed / predicted:.2f}"
                print(f"{said} (ms: {where})", flush=True)
    figures = {f"{name}_over_predicted": measured(found, "ratio") for name, found in ratios.items()}
    figures |= {name: measured(found, "tok/s") for name, found in rates_found.items()}
    return {**figures, "calibration": measured(spans, "s")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures how far forecasts are off.")
    parser.add_argument("--machine", required=True, help="what this machine is called in benchmarks/results")
    parser.add_argument("--loops", type=int, default=3, help="times that the machine is measured and every arm is run")
    parser.add_argument("--runs", type=int, default=2, help="prompts of an arm in a loop; their median counts")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS), help="these; nothing is kept")
    parser.add_argument("--folder", type=Path, help="where the model is made and kept; default: a temporary folder")
    words = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["STRATA_HOME"] = scratch  # rates of this run alone
            figures = run(make_model(words.folder or Path(scratch)), words.arms, words.loops, words.runs)
    except StrataError as error:
        print(f"strata: error: {error}", file=sys.stderr)
        return error.exit_status
    command = f"python benchmarks/forecasts.py --machine {words.machine} --loops {words.loops} --runs {words.runs}"
    record = Record(command, machine() | {"prompt_tokens": PROMPT, "decode_tokens": DECODE}, figures)
    if words.arms == list(ARMS):
        record.write(record_path(RESULTS, words.machine, "forecasts"))
    for name, figure in figures.items():
        print(f"{name}: {figure.value:.2f} ({figure.min:.2f} to {figure.max:.2f})")
    print(record.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
