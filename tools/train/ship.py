"""Makes packs of a trained checkpoint: one of each format that is measured, and the one that ships.

Lives beside the trainer. The shipped pack must stay below ``SHIPPED_BYTES``: NVFP4 experts, 8-bit matrices, and the
n-gram table in FP8 rows with one scale each, as large tables of the family are published (decision 0057). Knows the
pack writer, not the model.

    python tools/train/ship.py --checkpoint DIR --out PACK
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from strata.checkpoint.pack_writer import PackOptions, write_pack
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.checkpoint.source_model import SourceModel
from strata.models import find

__all__ = ["FORMATS", "SHIPPED_BYTES", "SHIPPED_FILE_BYTES", "Formats", "make_pack", "replace_folder"]

SHIPPED_BYTES = 24_000_000
SHIPPED_FILE_BYTES = 15_000_000
_FP8_LARGEST = 448.0


@dataclass(frozen=True)
class Formats:
    """Formats of a pack. ``fp8_table``: the n-gram table in FP8 rows instead of the dense format."""

    experts: str = "bf16"
    dense: str = "bf16"
    hyper: str = "bf16"
    fp8_table: bool = False


FORMATS = {
    "bf16": Formats(),
    "q8_0": Formats(experts="q8_0"),
    "nvfp4": Formats(experts="nvfp4"),
    "dense_q8_0": Formats(dense="q8_0"),
    "hyper_q8_0": Formats(hyper="q8_0"),
    "shipped": Formats(experts="nvfp4", dense="q8_0", hyper="q8_0", fp8_table=True),
}
"""What is measured, by name; each but the last changes one thing against ``bf16``."""


class Fp8Rows(SourceModel):
    """A checkpoint whose tables are handed over as FP8 rows, each with its own scale."""

    def has_row_scales(self, name: str) -> bool:
        return self.weight_map.entry(name).kind == "table" or super().has_row_scales(name)

    def read_fp8_rows(self, name: str, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in self.read_rows(name, rows_at_once):
            scales = rows.float().abs().amax(1) / _FP8_LARGEST
            scales = torch.where(scales > 0, scales, torch.ones_like(scales))
            yield (rows.float() / scales[:, None]).to(torch.float8_e4m3fn), scales


def make_pack(checkpoint: Path, destination: Path, formats: Formats) -> Path:
    """The pack of a BF16 checkpoint folder in these formats; ``destination`` must not exist."""
    options = PackOptions(
        experts=formats.experts,  # type: ignore[arg-type] # checked there
        dense=formats.dense,  # type: ignore[arg-type]
        hyper=formats.hyper,  # type: ignore[arg-type]
        expert_file_bytes=SHIPPED_FILE_BYTES,
    )
    with Checkpoint(checkpoint) as opened:
        family = find(opened.config)
        config = family.read_config(opened.config)
        kind = Fp8Rows if formats.fp8_table else SourceModel
        source = kind(opened, family.weight_map(config))
        source.name = "strata-small"  # not the folder that somebody trained in
        return write_pack(source, destination, config.family, options)


def replace_folder(source: Path, destination: Path) -> None:
    """Puts a finished folder where an older one may be."""
    if destination.exists():
        shutil.rmtree(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, destination)


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs a BF16 checkpoint folder as it would ship.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--format", choices=sorted(FORMATS), default="shipped")
    args = parser.parse_args()
    make_pack(args.checkpoint, args.out, FORMATS[args.format])


if __name__ == "__main__":
    main()
