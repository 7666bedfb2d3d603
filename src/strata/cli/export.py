"""``strata export MODEL FOLDER``: turns a pack back into a Hugging Face checkpoint in BF16.

Lives in ``cli``: names options and draws the bar; the work is ``checkpoint``'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from strata import interrupts
from strata.cli.loading import phase_bars
from strata.paths import expanded


def command(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A Strata pack: its folder, or a name as --model has.")],
    destination: Annotated[Path, typer.Argument(help="The checkpoint's folder, which must not exist yet.")],
) -> None:
    """Writes config, tokenizer, and BF16 weights that transformers and others load."""
    from strata.checkpoint.export import export_checkpoint
    from strata.engine.models import find_pack
    from strata.models import find

    interrupts.in_order()
    pack, destination = find_pack(name), expanded(destination)
    with phase_bars() as on_progress:
        path = export_checkpoint(pack, destination, find_family=find, progress=on_progress)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {size:,} bytes")
    if "vision_config" in json.loads((path / "config.json").read_text(encoding="utf-8")):
        print("the text model alone: packs keep no vision weights, so the checkpoint cannot look at pictures")
