"""Averages the weights of two checkpoints, of which one went on from the other: one command.

    python tools/train/average.py --first OUT2 --second OUT3 --share 0.5 --out OUT

Writes ``(1 - share) * first + share * second`` tensor by tensor, computed in FP32 and rounded once to BF16, with the
config and tokenizer of the first. What a later part forgot is often still in the mean, which costs nothing to run.
The method is that of Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization" (points
of one run), and of Wortsman et al. 2022, "Model soups" (models tuned from one start). Choose the share on functions
that no figure is of. There is no figures.json: what the trainer measured is not of these weights. Knows files and
names, not the model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from checkpoint import read_tensors
from safetensors import safe_open
from safetensors.torch import save_file

__all__ = ["average"]

KEPT = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json")  # fmt: skip


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Writes the checkpoint ``out``. Exits where the two are not of one architecture, or the mean would be one of
    them."""
    if not 0 < share < 1:
        sys.exit(f"--share {share}: give a number between 0 and 1")
    if out.resolve() in (first.resolve(), second.resolve()):
        sys.exit(f"--out {out}: give a folder other than the two that are read")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    other = read_tensors(second)
    shapes = {name: tensor.shape for name, tensor in read_tensors(first).items()}
    if configs[0] != configs[1] or shapes != {name: tensor.shape for name, tensor in other.items()}:
        sys.exit(f"{first} and {second} are not of one architecture: no mean of them is a model")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(first.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            mixed = {name: _mean(file.get_tensor(name), other[name], share) for name in file.keys()}  # noqa: SIM118
        save_file(mixed, out / path.name, metadata={"format": "pt"})
    for name in KEPT:
        if (first / name).exists():
            shutil.copy(first / name, out / name)
    if (second / "figures.json").exists():  # a part that goes on from the mean has it among those before it
        figures = json.loads((second / "figures.json").read_text()) | {"mean_with_before": share}
        (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


def _mean(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    return ((1 - share) * first.float() + share * second.float()).to(first.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--second", type=Path, required=True, help="one that went on from it")
    parser.add_argument("--share", type=float, required=True, help="of the second, between 0 and 1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    average(args.first, args.second, args.share, args.out)


if __name__ == "__main__":
    main()
