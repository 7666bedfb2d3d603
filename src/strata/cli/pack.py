"""``strata pack SOURCE PACK``: makes a pack of a Hugging Face checkpoint.

Lives in ``cli``: names options and draws the bar; the work is ``checkpoint``'s.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from strata import interrupts
from strata.cli.loading import phase_bars
from strata.paths import expanded

logger = logging.getLogger(__name__)


def command(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder: config.json and *.safetensors.")],
    destination: Annotated[Path, typer.Argument(help="The pack's folder, which must not exist yet.")],
    experts: Annotated[str, typer.Option(help="Format of routed experts: nvfp4, q8_0, or bf16.")] = "nvfp4",
    dense: Annotated[str, typer.Option(help="Format of all other matrices: q8_0, bf16, or f32.")] = "q8_0",
    hyper: Annotated[str, typer.Option(help="Format of hyper-connections: bf16, q8_0, or f32.")] = "bf16",
) -> None:
    """Makes a pack of a checkpoint. Experts that are NVFP4 already are taken over without loss."""
    from strata.checkpoint.recognise import Kind, recognise
    from strata.engine.locate import refusal

    found = recognise(source)  # a wrong path is told before anything heavy is imported
    if found.kind not in (Kind.SAFETENSORS, Kind.PACK):
        raise refusal(found)
    from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
    from strata.errors import CheckpointError
    from strata.models import find
    from strata.text.pipeline import TextPipeline

    interrupts.in_order()
    destination = expanded(destination)
    options = PackOptions(experts=experts, dense=dense, hyper=hyper)  # type: ignore[arg-type] # checked there
    try:
        if found.kind is Kind.SAFETENSORS:
            TextPipeline.from_directory(source)
    except CheckpointError as error:  # told now, not after an hour of packing; the pack still serves export
        logger.warning("the pack will not run: %s", error)
    try:
        with phase_bars() as on_progress:
            path = pack_checkpoint(source, destination, find, options, on_progress)
    except KeyboardInterrupt:
        print(f"strata: interrupted; {destination} was not made, the same command starts again", file=sys.stderr)
        raise
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {size:,} bytes; look at it with: strata inspect {path}")
