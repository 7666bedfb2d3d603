"""``strata inspect [MODEL]``: what a pack or a checkpoint holds, and whether every byte of it is sound.

Lives in ``cli``: turns a description into lines; the readers are ``checkpoint``'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from strata.cli.loading import phase_bars
from strata.paths import expanded

LEFT_COLUMN = 11


def command(
    model: Annotated[
        str | None, typer.Argument(help="A pack or a checkpoint folder, or a name in STRATA_HOME; else the built-in.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read everything and compare every checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Prints what a model holds; with --check, also reads every byte of it."""
    from strata.checkpoint.recognise import Kind, recognise
    from strata.engine.locate import refusal

    path = _find(model)
    found = recognise(path)
    if found.kind not in (Kind.SAFETENSORS, Kind.PACK):
        raise refusal(found)
    from strata.checkpoint.description import describe_checkpoint, describe_pack
    from strata.checkpoint.pack_reader import PackReader
    from strata.models import find

    if found.kind is Kind.SAFETENSORS:
        description = describe_checkpoint(path, find)
        if check:
            description["checked"] = _read_checkpoint(path)
    else:
        with PackReader(path, find) as reader:
            description = describe_pack(reader)
            if check:
                from strata.experts.profile import PROFILE_FILE, read_profile

                with phase_bars() as on_progress:
                    description["checked"] = reader.check(on_progress)
                if read_profile(path, reader.digest, len(reader.expert_layers), reader.num_experts) is not None:
                    description["checked"] += (path / PROFILE_FILE).stat().st_size
    print(json.dumps(description) if as_json else "\n".join(_lines(description)))


def _find(model: str | None) -> Path:
    if model is None:
        from strata.engine.models import open_model

        opened = open_model(None)
        opened.close()
        return opened.reader.folder
    from strata.checkpoint.recognise import Kind, recognise
    from strata.paths import find_home

    kept = find_home().models / model
    is_name = recognise(model).kind is Kind.ABSENT and recognise(kept).kind is not Kind.ABSENT
    return kept if is_name else expanded(model)


def _read_checkpoint(path: Path) -> int:
    """Reads every tensor that a pack would be made of; returns the bytes of the checkpoint's files."""
    from strata.checkpoint.description import check_checkpoint
    from strata.models import find

    with phase_bars() as on_progress:
        return check_checkpoint(path, find, on_progress)


def _lines(about: dict[str, Any]) -> list[str]:
    rows = [(about["kind"], about["path"]), ("family", about["family"])]
    if "weights" in about:
        rows.append(("weights", f"{about['weights']:,} in {_size(about['bytes'])}"))
    else:
        rows.append(("tensors", f"{about['tensors']:,} in {about['files']} files, {_size(about['bytes'])}"))
        rows.append(("stored as", ", ".join(f"{name} {_size(size)}" for name, size in about["stored"].items())))
    experts = about["experts"]
    if experts and "bytes" in experts:
        shape = f"{experts['layers']} layers x {experts['per_layer']}, {experts['format']}"
        each = f"{experts['bytes_each']:,} bytes each, {_size(experts['bytes'])} in {experts['files']} files"
        rows.append(("experts", f"{shape}, {each}"))
    elif experts:
        rows.append(("experts", f"{experts['layers']} layers x {experts['per_layer']}, {experts['format']}"))
    if about.get("dense"):
        rows.append(("dense", ", ".join(f"{name} {_size(size)}" for name, size in about["dense"].items())))
    for table in about.get("tables", []):
        rows.append(("table", f"{table['rows']:,} x {table['columns']} {table['format']}, {_size(table['bytes'])}"))
    for name, target in about.get("links", {}).items():
        rows.append(("link", f"{name} -> {target if target.isprintable() else repr(target)}"))
    if about["left_out"]:
        rows.append(("left out", ", ".join(about["left_out"])))
    rows.append(("tokenizer", ", ".join(about["tokenizer_files"]) or "none"))
    if "written_by" in about:
        rows.append(("format", f"{about['format']}, written by {about['written_by']}"))
    if "checked" in about:
        rows.append(("checked", f"{about['checked']:,} bytes, all sound"))
    return [f"{name:{LEFT_COLUMN}}{words}" for name, words in rows]


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
