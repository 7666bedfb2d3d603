"""Holds a manifest against itself and against the weights that a family asks for, before anything else is read.

Lives in ``checkpoint`` behind the readers of packs; bounds of single fields are ``manifest``'s. It must not know a
family, which is an argument. Decision record 0118.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from strata.checkpoint.manifest import (
    DENSE_FILE,
    EXPERT_TABLES_FILE,
    DenseTensor,
    ExpertsSection,
    Manifest,
    TableRecord,
    shown,
)
from strata.checkpoint.recognise import MANIFEST_FILE, naming_config
from strata.checkpoint.table_rows import row_bytes
from strata.checkpoint.weight_map import WeightEntry, WeightMap
from strata.errors import CheckpointError

__all__ = ["Q8_BLOCK", "SCALES_SUFFIX", "MapOfFamily", "check_family", "check_manifest", "stored_tensors"]

SCALES_SUFFIX = ".scales"
Q8_BLOCK = 32
_AGAIN = "make the pack again with strata pack"
_AXES = {"matrix": (2,), "conv": (2,), "vector": (0, 1), "integers": (0, 1)}
_FORMATS = {"matrix": ("f32", "bf16", "q8_0"), "conv": ("f32",), "vector": ("f32",), "integers": ("i64",)}
_DTYPES = {"f32": "F32", "bf16": "BF16", "i64": "I64"}
# An export writes files of its own beside those of the tokenizer.
_RESERVED = ("config.json", MANIFEST_FILE, "expert-profile.json", "model.safetensors.index.json")


class MapOfFamily(Protocol):
    """The part of a family that a manifest is held against."""

    def read_config(self, raw: Mapping[str, Any]) -> Any: ...
    def weight_map(self, config: Any) -> WeightMap: ...


def stored_tensors(name: str, record: DenseTensor) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(type, shape) of each tensor of ``dense.safetensors`` that one weight is made of; none for a tied one."""
    if record.tied_to is not None:
        return {}
    shape = tuple(record.shape)
    if record.format == "q8_0":
        blocks = -(-shape[1] // Q8_BLOCK)
        return {name: ("I8", (shape[0], blocks * Q8_BLOCK)), name + SCALES_SUFFIX: ("F16", (shape[0], blocks))}
    return {name: (_DTYPES[record.format], shape)}


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Whether what the fields say fits together. Raises ``CheckpointError``."""
    _Check(folder, manifest).run()


def check_family(folder: Path, manifest: Manifest, find_family: Callable[[Mapping[str, Any]], MapOfFamily]) -> None:
    """Whether the manifest lists exactly the weights that the family of its config asks for, in their sizes.

    Raises ``CheckpointError``, for a config that no family reads too."""
    with naming_config(folder, f"{MANIFEST_FILE}: config"):
        family = find_family(manifest.config)
        config = family.read_config(manifest.config)
    check = _Check(folder, manifest)
    check.equal("family", manifest.family, str(config.family))
    check.against(family.weight_map(config))


class _Check:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.path, self.manifest = folder / MANIFEST_FILE, manifest

    def run(self) -> None:
        manifest = self.manifest
        for name, record in manifest.dense.items():
            self._check_dense(name, record)
        for name, table in manifest.tables.items():
            self._check_table(name, table)
        self._check_once("a name is of a weight and of a table", [*manifest.dense, *manifest.tables])
        stored = [tensor for name, record in manifest.dense.items() for tensor in stored_tensors(name, record)]
        self._check_once("two weights claim one stored tensor", stored)
        self._check_once("absent_groups names a group twice", manifest.absent_groups)
        if manifest.experts is not None:
            self._check_experts(manifest.experts)
        self._check_sources()
        self._check_files()

    def refuse(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", _AGAIN)

    def equal(self, what: str, found: Any, needed: Any) -> None:
        if found != needed:
            raise self.refuse(f"{what} is {_words(found)}, {_words(needed)} is needed")

    # Against itself -----------------------------------------------------------------------------------------------

    def _check_once(self, what: str, names: Iterable[str]) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self.refuse(f"{what}: {shown(name)}")
            seen.add(name)

    def _check_dense(self, name: str, record: DenseTensor) -> None:
        what = f"dense weight {shown(name)}"
        if len(record.shape) not in _AXES[record.kind]:
            raise self.refuse(f"{what} is a {record.kind} of shape {record.shape}")
        if record.format not in _FORMATS[record.kind]:
            raise self.refuse(f"{what} is a {record.kind} in {record.format}, which is not read")
        if record.tied_to is not None:
            self._check_tied(what, name, record)
            return
        rows = record.shape[0] if record.shape else 1
        self._check_parts(what, record.parts, rows)
        if record.source_columns is not None:
            start, stop = record.source_columns
            if len(record.shape) != 2 or stop - start != record.shape[1]:
                raise self.refuse(f"{what} of shape {record.shape} cannot be columns {start} to {stop} of its source")

    def _check_tied(self, what: str, name: str, record: DenseTensor) -> None:
        assert record.tied_to is not None
        other = self.manifest.dense.get(record.tied_to)
        if other is None or other.tied_to is not None:
            raise self.refuse(f"{what} is tied to {shown(record.tied_to)}, which is no weight with data of its own")
        if (other.kind, other.format, other.shape) != (record.kind, record.format, record.shape):
            raise self.refuse(f"{what} is tied to {shown(record.tied_to)}, which is of another kind, format, or shape")
        if record.checksums or record.parts or record.source_columns is not None:
            raise self.refuse(f"{what} is tied and yet has checksums, parts, or source_columns of its own")

    def _check_parts(self, what: str, parts: list[tuple[str, int]], rows: int) -> None:
        found = sum(count for _, count in parts)
        if found != rows:
            raise self.refuse(f"{what}: its parts have {found} rows, the weight has {rows}")

    def _check_table(self, name: str, table: TableRecord) -> None:
        what = f"table {shown(name)}"
        if table.row_bytes != row_bytes(table.columns, table.format):
            raise self.refuse(f"{what}: rows of {table.row_bytes} bytes are not read")
        self._check_parts(what, table.parts, table.rows)

    def _check_experts(self, experts: ExpertsSection) -> None:
        if len(set(experts.layers)) != len(experts.layers):
            raise self.refuse("experts.layers names a layer twice")
        self.equal("the number of experts.names", len(experts.names), len(experts.layers))
        blobs = len(experts.layers) * experts.num_experts
        self.equal("the number of experts.files", len(experts.files), -(-blobs // experts.blobs_per_file))

    def _check_sources(self) -> None:
        """Each tensor of an export comes from one place."""
        names: list[str] = []
        joined: dict[str, list[tuple[tuple[int, int], DenseTensor]]] = {}
        for record in self.manifest.dense.values():
            if record.source_columns is None:
                names += [part for part, _ in record.parts]
            else:
                self.equal("the number of parts of a weight with source_columns", len(record.parts), 1)
                joined.setdefault(record.parts[0][0], []).append((record.source_columns, record))
        for name, pieces in joined.items():
            names.append(name)
            end = 0
            for (start, stop), record in sorted(pieces, key=lambda piece: piece[0]):
                if start != end or record.shape[0] != pieces[0][1].shape[0]:
                    raise self.refuse(f"columns {start} to {stop} of {shown(name)} overlap, or leave a gap")
                end = stop
        names += [part for table in self.manifest.tables.values() for part, _ in table.parts]
        if self.manifest.experts is not None:
            each = [(one.gate, one.up, one.down) for one in self.manifest.experts.names]
            without = [name for three in each for name in three if "{expert}" not in name]
            if without:
                raise self.refuse(f"experts.names: {shown(without[0])} does not say {{expert}}")
            names += [name for three in each for name in three]
        self._check_once("two weights have one source", names)

    def _check_files(self) -> None:
        manifest = self.manifest
        experts = manifest.experts
        tables = [table.file for table in manifest.tables.values()]
        large = [*tables, *(experts.files if experts else ())]
        for name in manifest.tokenizer_files:
            if name.casefold() in _RESERVED or name.casefold().endswith((".safetensors", ".unfinished")):
                raise self.refuse(f"tokenizer_files: {shown(name)} is the name of another file")
        needed = [DENSE_FILE, *([EXPERT_TABLES_FILE] if experts else ()), *manifest.tokenizer_files]
        # Names that differ in case alone are one file on some systems.
        self._check_once("one file serves two ends", [name.casefold() for name in (*needed, *large, MANIFEST_FILE)])
        self._same_names("files", manifest.files, needed)

    def _same_names(self, what: str, found: Iterable[str], needed: Iterable[str]) -> None:
        found, needed = set(found), set(needed)
        if needed - found:
            raise self.refuse(f"{what}: {len(needed - found)} are missing: {_some(needed - found)}")
        if found - needed:
            raise self.refuse(f"{what}: {len(found - needed)} are left over: {_some(found - needed)}")

    # Against a family ---------------------------------------------------------------------------------------------

    def against(self, weight_map: WeightMap) -> None:
        manifest = self.manifest
        groups = {entry.group for entry in weight_map.dense} | {entry.group for entry in weight_map.experts}
        unknown = set(manifest.absent_groups) - groups
        if unknown:
            raise self.refuse(f"absent_groups: {_some(unknown)} is no optional group of the model")
        wanted = {entry.name: entry for entry in weight_map.dense if entry.group not in manifest.absent_groups}
        self._same_names("dense", manifest.dense, [name for name, entry in wanted.items() if entry.kind != "table"])
        self._same_names("tables", manifest.tables, [name for name, entry in wanted.items() if entry.kind == "table"])
        for name, record in manifest.dense.items():
            self._check_entry(f"dense weight {shown(name)}", record, wanted[name])
        for name, table in manifest.tables.items():
            self.equal(f"the size of table {shown(name)}", [table.rows, table.columns], list(wanted[name].shape))
        self._check_layers(weight_map)

    def _check_entry(self, what: str, record: DenseTensor, entry: WeightEntry) -> None:
        self.equal(f"the kind of {what}", record.kind, entry.kind)
        self.equal(f"the shape of {what}", record.shape, list(entry.shape))
        self.equal(f"tied_to of {what}", record.tied_to, entry.tied_to)
        self.equal(f"source_columns of {what}", record.source_columns, entry.columns)

    def _check_layers(self, weight_map: WeightMap) -> None:
        wanted = [entry for entry in weight_map.experts if entry.group not in self.manifest.absent_groups]
        experts = self.manifest.experts
        self.equal("experts.layers", experts.layers if experts else [], [entry.layer for entry in wanted])
        for entry in wanted:
            assert experts is not None
            sizes = (experts.num_experts, experts.hidden, experts.intermediate)
            what = f"num_experts, hidden, and intermediate of the experts of layer {entry.layer}"
            self.equal(what, list(sizes), [entry.num_experts, entry.hidden, entry.intermediate])


def _words(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 120 else f"{text[:100]}..."


def _some(names: Iterable[str], limit: int = 4) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(shown(name) for name in ordered[:limit]) + more
