"""``strata list``: the models in STRATA_HOME, with size, format and family.

Lives in ``cli``: turns descriptions into a table; the readers are ``checkpoint``'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from strata.cli.home_models import folder_bytes, home_models
from strata.errors import CheckpointError
from strata.paths import find_home

COLUMNS = ("name", "size", "format", "family")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Lists the models in STRATA_HOME; any of these names can be given as MODEL."""
    rows = [describe(path) for path in home_models()]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    if not rows:
        print(f"no models in {find_home().models}; 'strata pack SOURCE {find_home().models}/NAME' puts one there")
        return
    table = [COLUMNS, *((row["name"], format_size(row["bytes"]), row["format"], row["family"]) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def describe(path: Path) -> dict[str, Any]:
    """A row: a folder that is no sound model says what it is in ``format``."""
    from strata.checkpoint.description import describe_checkpoint, describe_pack
    from strata.checkpoint.pack_reader import PackReader
    from strata.checkpoint.recognise import Kind, recognise
    from strata.models import find

    row = {"name": path.name, "bytes": folder_bytes(path), "format": "", "family": "-"}
    try:
        found = recognise(path)
        if found.kind is Kind.PACK:
            with PackReader(path, find) as reader:
                about = describe_pack(reader)
        elif found.kind is Kind.SAFETENSORS:
            about = describe_checkpoint(path, find)
        else:
            return row | {"format": found.kind.value}
    except CheckpointError as error:
        return row | {"format": f"cannot be read: {error.message}"}
    experts = about["experts"]
    stored = experts["format"] if experts else "no experts"
    return row | {"format": f"{about['kind']}, {stored}", "family": about["family"]}


def format_size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
