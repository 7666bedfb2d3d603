"""What ``strata inspect`` tells of a pack or a checkpoint, as plain numbers and words.

Lives in ``checkpoint``, beside the readers whose contents it sums up; printing is the command's. It must not know
families (``find_family`` is an argument).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strata.checkpoint.dense_writer import SLICE_BYTES
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import FamilyModule, Progress
from strata.checkpoint.recognise import naming_config
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.checkpoint.source_model import SourceModel

__all__ = ["check_checkpoint", "describe_checkpoint", "describe_pack"]


def describe_pack(reader: PackReader) -> dict[str, Any]:
    """Sizes in bytes, counts of weights, and formats of an open pack. JSON-ready; reads no weights."""
    manifest = reader.manifest
    formats: Counter[str] = Counter()
    weights = 0
    for name, record in manifest.dense.items():
        formats[record.format] += reader.matrix_bytes(name)
        weights += 0 if record.tied_to else math.prod(record.shape)
    tables = [
        {"name": name, "rows": table.rows, "columns": table.columns, "format": table.format}
        | {"bytes": table.rows * table.row_bytes}
        for name, table in manifest.tables.items()
    ]
    weights += sum(table.rows * table.columns for table in manifest.tables.values())
    experts = manifest.experts
    about_experts: dict[str, Any] | None = None
    if experts is not None:
        blobs = len(experts.layers) * experts.num_experts
        weights += blobs * 3 * experts.hidden * experts.intermediate
        about_experts = {
            "format": experts.format,
            "layers": len(experts.layers),
            "per_layer": experts.num_experts,
            "hidden": experts.hidden,
            "intermediate": experts.intermediate,
            "bytes_each": experts.blob_bytes,
            "bytes": blobs * experts.blob_bytes,
            "files": len(experts.files),
        }
    return {
        "kind": "pack",
        "path": str(reader.folder),
        "family": manifest.family,
        "source": manifest.source_name,
        "weights": weights,
        "bytes": reader.total_bytes,
        "experts": about_experts,
        "links": reader.links,
        "dense": {format: size for format, size in sorted(formats.items()) if size},
        "tables": tables,
        "left_out": manifest.absent_groups,
        "tokenizer_files": manifest.tokenizer_files,
        "format": manifest.version,
        "written_by": manifest.written_by,
    }


def describe_checkpoint(folder: str | Path, find_family: Callable[[Mapping[str, Any]], FamilyModule]) -> dict[str, Any]:
    """What a checkpoint holds, after its accounting against the family's map. Reads headers alone.

    Raises ``CheckpointError`` for one that could not be packed.
    """
    with Checkpoint(folder) as checkpoint:
        with naming_config(checkpoint.folder):
            family = find_family(checkpoint.config)
            config = family.read_config(checkpoint.config)
        model = SourceModel(checkpoint, family.weight_map(config))
        stored = Counter[str]()
        for spec in checkpoint.specs.values():
            stored[spec.dtype] += spec.nbytes
        entries = model.expert_entries
        nvfp4 = sum(model.experts_are_nvfp4(entry.layer) for entry in entries)
        return {
            "kind": "checkpoint",
            "path": str(checkpoint.folder),
            "family": str(config.family),
            "tensors": len(checkpoint.specs),
            "files": len({spec.path for spec in checkpoint.specs.values()}),
            "bytes": sum(stored.values()),
            "stored": dict(stored.most_common()),
            "experts": {
                "format": "nvfp4" if entries and nvfp4 == len(entries) else "mixed" if nvfp4 else "plain",
                "layers": len(entries),
                "per_layer": entries[0].num_experts if entries else 0,
            },
            "left_out": sorted(model.absent_groups),
            "tokenizer_files": [path.name for path in model.tokenizer_files],
        }


def check_checkpoint(
    folder: str | Path,
    find_family: Callable[[Mapping[str, Any]], FamilyModule],
    progress: Progress | None = None,
) -> int:
    """Reads and checks every value that a pack would be made of; returns the bytes read from files.

    Raises ``CheckpointError`` at the first value or scale that no arithmetic is defined for.
    """
    with Checkpoint(folder) as checkpoint:
        family = find_family(checkpoint.config)
        model = SourceModel(checkpoint, family.weight_map(family.read_config(checkpoint.config)))
        total = sum(spec.nbytes for spec in checkpoint.specs.values())
        for entry in model.entries:
            if entry.tied_to is None:
                for _ in model.read_rows(entry.name, max(1, SLICE_BYTES // (4 * max(1, math.prod(entry.shape[1:]))))):
                    if progress is not None:
                        progress("dense weights", checkpoint.bytes_read, total)
        for experts in model.expert_entries:
            for expert in range(experts.num_experts):
                model.read_expert(experts.layer, expert)
                if progress is not None:
                    progress("experts", checkpoint.bytes_read, total)
        return checkpoint.bytes_read
