"""From a trained checkpoint to everything that ships of it: one command.

    python tools/train/finish.py --checkpoint DIR [--tokens DIR] [--machine cpu2]

Packs every format, measures, learns the expert profile, and writes the pack with its profile and card to
src/strata/data/small, goldens to tests/data, records and pictures to benchmarks/results, and NOTICE's list. What is
already packed in ``--packs`` is kept; ``--keep-record`` takes the figures of the last run. ``--root`` writes to another
checkout (a rehearsal). Knows the order of things and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import render_card
from data import load_stream
from evaluate import QUICK, Evaluation, Sizes, checkpoint_sha256, make_packs, table, to_record
from goldens import GOLDEN_FILE, make_goldens
from ship import SHIPPED_BYTES, SHIPPED_FILE_BYTES, replace_folder
from subject import Subject

from strata.benchmark_record import Figure, record_path
from strata.checkpoint.manifest import read_manifest
from strata.config_sources import resolve_here
from strata.engine.cache_bench import bench_cache, draw_cache
from strata.errors import ConfigError
from strata.experts.profile import ExpertProfile

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

import attributions  # noqa: E402  (tools is no package)

PROFILE_WINDOWS = {"code": 9, "chat": 3}
PROFILE_TOKENS = 2048
CARD = "MODEL_CARD.md"


def learn_profile(pack: Path, tokens: Path) -> None:
    """Counts picks over a fixed sample of training text, drafts included, and keeps them in the pack's folder."""
    rng, windows = np.random.default_rng(11), []
    for name, count in PROFILE_WINDOWS.items():
        stream = load_stream(tokens, *(("code-0", "code-1") if name == "code" else ("chat",)))
        starts = rng.permutation((len(stream) - 1) // PROFILE_TOKENS)[:count]
        windows += [stream[s * PROFILE_TOKENS : (s + 1) * PROFILE_TOKENS + 1].tolist() for s in starts]
    with Subject(pack) as subject:
        picks = subject.picks(windows).numpy()
    ExpertProfile(sum(len(window) - 1 for window in windows), picks).write(pack, read_manifest(pack).manifest_sha256)


def check_size(pack: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in pack.iterdir()}
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    print(f"pack: {total:,} bytes, the largest file is {largest} with {sizes[largest]:,}")
    if total > SHIPPED_BYTES or sizes[largest] > SHIPPED_FILE_BYTES:
        sys.exit(f"the pack is above {SHIPPED_BYTES:,} bytes or has a file above {SHIPPED_FILE_BYTES:,}")


def measure(args: argparse.Namespace, packs: dict[str, Path], kept: Path) -> dict[str, Any]:
    """The record as plain data: measured now and written to ``kept``, or read from there."""
    if not args.keep_record:
        evaluation = Evaluation(packs, args.tokens, QUICK if args.quick else Sizes())
        evaluation.run()
        print(table(evaluation.figures))
        record = to_record(evaluation, checkpoint_sha256(args.checkpoint))
        record.write(kept)
        (args.packs / "samples.json").write_text(json.dumps(evaluation.samples, indent=1) + "\n")
    found: dict[str, Any] = json.loads(kept.read_text())
    if found["machine"]["checkpoint_sha256"] != checkpoint_sha256(args.checkpoint):
        sys.exit(f"{kept} is of other weights: leave --keep-record out")
    return found


def measure_cache(args: argparse.Namespace, pack: Path, results: Path) -> None:
    """Hit rates over held-out text, as ``strata bench cache`` gives them, and their picture where it can be drawn."""
    with Subject(pack) as subject:
        ids = load_stream(args.tokens, "heldout")[: 1024 if args.quick else 4096].tolist()
        text = subject.opened.text.tokenizer.decode(ids)
    requested = resolve_here(arguments={"model": str(pack)})
    found, record = bench_cache(requested, text=text, tokens=len(ids), command="strata bench cache --text HELDOUT")
    print("\n".join(found.lines()))
    record.write(record_path(results, args.machine, "small-cache"))
    try:
        draw_cache(found, results / args.machine / "small-cache.png")
    except ConfigError as error:
        print(f"no picture of the hit rates: {error}")


def figures_of(record: dict[str, Any]) -> dict[str, Figure]:
    fields = {field.name for field in dataclasses.fields(Figure)}
    return {
        name: Figure(**{key: value for key, value in one.items() if key in fields})
        for name, one in record["figures"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="what train.py wrote to --out, tokenizer beside")
    parser.add_argument("--tokens", type=Path, default=HERE / ".tokens", help="folder written by pack.py")
    parser.add_argument("--packs", type=Path, help="keep the packs of all formats here")
    parser.add_argument("--machine", default="cpu2")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--keep-record", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: measures almost nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the native operations have threads of their own; torch's would fight them
    with tempfile.TemporaryDirectory() as scratch:
        args.packs = args.packs or Path(scratch)
        args.packs.mkdir(parents=True, exist_ok=True)
        finish(args)


def finish(args: argparse.Namespace) -> None:
    results = args.root / "benchmarks" / "results"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if not (args.checkpoint / name).exists():
            shutil.copy(args.tokens / name, args.checkpoint / name)
    packs = make_packs(args.checkpoint, args.packs)
    learn_profile(packs["shipped"], args.tokens)
    record = measure(args, packs, record_path(results, args.machine, "small"))
    meta = json.loads((args.tokens / "meta.json").read_text())
    make_goldens(packs["shipped"], meta, load_stream(args.tokens, "heldout"), args.root / "tests/data" / GOLDEN_FILE)
    measure_cache(args, packs["shipped"], results)
    trained, curve = args.checkpoint / "figures.json", args.checkpoint / "loss.png"
    corpus = attributions.read_corpus()
    config = json.loads((args.checkpoint / "config.json").read_text())
    text = render_card(
        figures_of(record), record["machine"], corpus, config, packs["shipped"],
        json.loads(trained.read_text()) if trained.exists() else {},
    )  # fmt: skip
    (packs["shipped"] / CARD).write_text(text)
    check_size(packs["shipped"])
    replace_folder(packs["shipped"], args.root / "src/strata/data/small")
    rounds = args.checkpoint / "rounds.jsonl"
    for source, name in (
        (trained, "small-training.json"), (curve, "small-loss.png"), (rounds, "small-rounds.jsonl")
    ):  # fmt: skip
        if source.exists():
            (results / "h200").mkdir(parents=True, exist_ok=True)
            shutil.copy(source, results / "h200" / name)
    notice = args.root / "NOTICE"
    notice.write_text(attributions.render_notice(notice.read_text(), corpus))
    print(f"written: src/strata/data/small, tests/data/{GOLDEN_FILE}, benchmarks/results, NOTICE")


if __name__ == "__main__":
    main()
