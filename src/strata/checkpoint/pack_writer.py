"""Makes a Strata pack of a checkpoint: streaming, checked, and there only when it is whole.

Lives in ``checkpoint``. The order: account for the source, plan every byte, see that the disk has room, write
dense weights, tables, and expert blobs slice by slice, the manifest last, rename. It must not know families
(``find_family`` is an argument) or how a blob is laid out (``quant`` does).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from safetensors.torch import save as save_safetensors

from strata.checkpoint.dense_writer import (
    SLICE_BYTES,
    DenseFormats,
    DensePlan,
    describe_dense,
    hash_dense,
    plan_dense,
    write_dense,
)
from strata.checkpoint.in_order import in_order
from strata.checkpoint.manifest import (
    DENSE_FILE,
    EXPERT_TABLES_FILE,
    FORMAT_NUMBER,
    NEEDS_VERSION,
    ExpertNames,
    ExpertsSection,
    FileRecord,
    Manifest,
    TableRecord,
    check_file_name,
    encode_manifest,
)
from strata.checkpoint.manifest_check import check_manifest
from strata.checkpoint.pack_folder import WholeFolder
from strata.checkpoint.recognise import MANIFEST_FILE, naming_config
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.checkpoint.source_model import ExpertWeights, Projection, SourceModel, WeightSource
from strata.checkpoint.table_rows import TableFormat, encode_rows, row_bytes
from strata.checkpoint.weight_map import WeightEntry, WeightMap
from strata.errors import CheckpointError, ConfigError
from strata.kernels.cpu import packing
from strata.kernels.cpu.checksum import checksum
from strata.kernels.ops import MatrixFormat
from strata.quant.blocks import ExpertFormat, QuantisedMatrix, dequantise
from strata.quant.layout import ExpertLayout
from strata.version import VERSION

__all__ = ["LAYOUT_NUMBER", "FamilyModule", "PackOptions", "Progress", "pack_checkpoint", "write_pack"]

LAYOUT_NUMBER = 1  # of ExpertLayout; a pack of another layout is made again
EXPERT_FILE_BYTES = 4 << 30
MANIFEST_ROOM = (768, 192)  # bytes in the manifest, at the most: a weight, and each source tensor of it
PackedExperts = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""From layer and expert to a blob of the pack's layout and its three tensor scales."""
_MATRIX_FORMATS = ("q8_0", "bf16", "f32")


class FamilyModule(Protocol):
    """The part of a family that a pack needs."""

    def read_config(self, raw: Mapping[str, Any]) -> Any: ...
    def weight_map(self, config: Any) -> WeightMap: ...


class Progress(Protocol):
    """Told after each step what is being written, and how many of how many bytes are."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class PackOptions:
    """``dense``: matrices, embedding, head, and BF16 tables; ``hyper``: hyper-connections; routers and norms stay
    FP32. ``expert_file_bytes`` bounds one file of blobs. Raises ``ConfigError`` for a format there is not."""

    experts: ExpertFormat = "nvfp4"
    dense: MatrixFormat = "q8_0"
    hyper: MatrixFormat = "bf16"
    expert_file_bytes: int = EXPERT_FILE_BYTES

    def __post_init__(self) -> None:
        for option, value in (("--dense", self.dense), ("--hyper", self.hyper)):
            if value not in _MATRIX_FORMATS:
                raise ConfigError(f"{option} {value!r} is not known", f"use one of {', '.join(_MATRIX_FORMATS)}")
        ExpertLayout(1, 1, self.experts)


def pack_checkpoint(
    source: str | Path,
    destination: str | Path,
    find_family: Callable[[Mapping[str, Any]], FamilyModule],
    options: PackOptions = PackOptions(),
    progress: Progress | None = None,
) -> Path:
    """Packs the checkpoint folder ``source`` and returns the pack's folder. ``find_family`` maps a raw config to its
    family. Raises ``CheckpointError`` for a source that does not fit and for a disk without room."""
    with Checkpoint(source) as checkpoint:
        with naming_config(checkpoint.folder):
            family = find_family(checkpoint.config)
            config = family.read_config(checkpoint.config)
        model = SourceModel(checkpoint, family.weight_map(config))
        return write_pack(model, destination, str(config.family), options, progress)


def write_pack(
    source: WeightSource,
    destination: str | Path,
    family: str,
    options: PackOptions = PackOptions(),
    progress: Progress | None = None,
    *,
    blobs: PackedExperts | None = None,
) -> Path:
    """Writes the pack of any source of weights; see ``pack_checkpoint``. ``blobs``: the source's experts as they are to
    be stored, in place of ``read_expert``."""
    writer = _PackWriter(source, family, options, progress, blobs)
    with WholeFolder(destination, writer.total_bytes) as folder:
        writer.write(folder)
    return folder.destination


class _PackWriter:
    """One run: plans in the constructor, writes once."""

    def __init__(
        self,
        source: WeightSource,
        family: str,
        options: PackOptions,
        progress: Progress | None,
        blobs: PackedExperts | None = None,
    ) -> None:
        self._blobs = blobs
        for path in source.tokenizer_files:
            try:
                check_file_name(path.name)
            except ValueError as error:
                raise CheckpointError(f"{path.parent}: {error}", "rename the file") from error
        self.source, self.family, self.options = source, family, options
        self._progress = progress
        self._done = 0
        self._files: dict[str, FileRecord] = {}
        self.dense: DensePlan = plan_dense(source.entries, DenseFormats(options.dense, options.hyper))
        self.tables = [entry for entry in source.entries if entry.kind == "table"]
        self.layout = self._find_layout()
        self.total_bytes = self._count_bytes()

    def write(self, folder: WholeFolder) -> None:
        """Everything, the manifest last."""
        folder.write(DENSE_FILE, lambda file: write_dense(file, self.source, self.dense, self._step("dense weights")))
        digest, sums = hash_dense(folder.path / DENSE_FILE)
        self._files[DENSE_FILE] = FileRecord(nbytes=self.dense.nbytes, sha256=digest)
        tables = {entry.name: self._write_table(folder, entry, number) for number, entry in enumerate(self.tables)}
        experts = self._write_experts(folder)
        for path in self.source.tokenizer_files:
            folder.copy(path)
            self._record(folder, path.name)
        manifest = Manifest(
            format="strata-pack",
            version=FORMAT_NUMBER,
            needs=NEEDS_VERSION,
            written_by=f"strata {VERSION}",
            family=self.family,
            source_name="".join(letter if letter.isprintable() else "?" for letter in self.source.name),
            config=self.source.config,
            absent_groups=sorted(self.source.absent_groups),
            dense=describe_dense(self.source, self.dense, sums),
            tables=tables,
            experts=experts,
            tokenizer_files=[path.name for path in self.source.tokenizer_files],
            files=self._files,
        )
        check_manifest(folder.destination, manifest)  # never a pack that no reader takes
        folder.write(MANIFEST_FILE, lambda file: _write(file, encode_manifest(manifest)))

    def _find_layout(self) -> ExpertLayout | None:
        entries = self.source.expert_entries
        shapes = {(entry.num_experts, entry.hidden, entry.intermediate) for entry in entries}
        if len(shapes) > 1:
            raise CheckpointError(f"layers have experts of different sizes ({sorted(shapes)}), which is not packed")
        return ExpertLayout(entries[0].hidden, entries[0].intermediate, self.options.experts) if entries else None

    def _count_bytes(self) -> int:
        blobs = sum(entry.num_experts for entry in self.source.expert_entries)
        experts = blobs * (self.layout.blob_bytes + 20) if self.layout else 0
        tables = sum(entry.shape[0] * row_bytes(entry.shape[1], self._table_format(entry)) for entry in self.tables)
        small = sum(path.stat().st_size for path in self.source.tokenizer_files)
        weights = len(self.source.entries) + len(self.source.expert_entries) + 8
        parts = sum(len(self.source.parts(entry.name)) for entry in self.source.entries)
        manifest = MANIFEST_ROOM[0] * weights + MANIFEST_ROOM[1] * parts
        return self.dense.nbytes + experts + tables + small + manifest

    def _step(self, phase: str) -> Callable[[int], None]:
        def step(nbytes: int) -> None:
            self._done += nbytes
            if self._progress is not None:
                self._progress(phase, min(self._done, self.total_bytes), self.total_bytes)

        return step

    def _record(self, folder: WholeFolder, name: str) -> None:
        with (folder.path / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._files[name] = FileRecord(nbytes=(folder.path / name).stat().st_size, sha256=digest)

    def _table_format(self, entry: WeightEntry) -> TableFormat:
        """FP8 rows are kept as they are; others follow the dense option."""
        return "f8_e4m3" if self.source.has_row_scales(entry.name) else cast(TableFormat, self.options.dense)

    def _write_table(self, folder: WholeFolder, entry: WeightEntry, number: int) -> TableRecord:
        rows, columns = entry.shape
        format = self._table_format(entry)
        name = f"table-{number:02d}.rows"
        at_once = max(1, SLICE_BYTES // (4 * columns))
        step = self._step("tables")

        def fill(file: IO[bytes]) -> None:
            first = 0
            if format == "f8_e4m3":
                for codes, scales in self.source.read_fp8_rows(entry.name, at_once):
                    step(file.write(encode_rows(codes, format, first, scales).data))
                    first += codes.shape[0]
            else:
                for values in self.source.read_rows(entry.name, at_once):
                    step(file.write(encode_rows(values, format, first, None).data))
                    first += values.shape[0]

        folder.write(name, fill)
        return TableRecord(
            file=name,
            format=format,
            rows=rows,
            columns=columns,
            row_bytes=row_bytes(columns, format),
            parts=self.source.parts(entry.name),
        )

    def _write_experts(self, folder: WholeFolder) -> ExpertsSection | None:
        if self.layout is None:
            return None
        layout, entries = self.layout, self.source.expert_entries
        count = entries[0].num_experts
        places = [(entry.layer, expert) for entry in entries for expert in range(count)]
        per_file = max(1, self.options.expert_file_bytes // layout.blob_bytes)
        scales: list[torch.Tensor] = []
        sums: list[int] = []
        files: list[str] = []
        for start in range(0, len(places), per_file):
            files.append(f"experts-{len(files):05d}.bin")
            part = places[start : start + per_file]
            folder.write(files[-1], lambda file, part=part: self._write_blobs(file, part, scales, sums))  # type: ignore[misc]
        tables = {
            "tensor_scales": torch.cat(scales).reshape(len(entries), count, 3),
            "checksums": torch.tensor(sums, dtype=torch.uint64).view(torch.int64).reshape(len(entries), count),
        }
        folder.write(EXPERT_TABLES_FILE, lambda file: _write(file, save_safetensors(tables)))
        self._record(folder, EXPERT_TABLES_FILE)
        names = [self.source.expert_names(entry.layer) for entry in entries]
        return ExpertsSection(
            format=layout.format,
            layout=LAYOUT_NUMBER,
            hidden=layout.hidden,
            intermediate=layout.intermediate,
            num_experts=count,
            blob_bytes=layout.blob_bytes,
            blobs_per_file=per_file,
            layers=[entry.layer for entry in entries],
            names=[ExpertNames(gate=gate, up=up, down=down) for gate, up, down in names],
            files=files,
        )

    def _write_blobs(
        self, file: IO[bytes], places: list[tuple[int, int]], scales: list[torch.Tensor], sums: list[int]
    ) -> None:
        assert self.layout is not None
        step = self._step("experts")
        at_once = max(1, SLICE_BYTES // (12 * self.layout.hidden * self.layout.intermediate))
        batches = [places[start : start + at_once] for start in range(0, len(places), at_once)]
        for blobs, batch_sums, tensor_scales in in_order(self._pack_batch, batches):
            for blob in blobs.numpy():
                step(file.write(blob.data))
            sums.extend(batch_sums)
            scales.append(tensor_scales)

    def _pack_batch(self, places: list[tuple[int, int]]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        assert self.layout is not None
        layout = self.layout
        if self._blobs is not None:
            packed = [self._blobs(layer, expert) for layer, expert in places]
            sums = [checksum(blob.numpy()) for blob, _ in packed]
            return torch.stack([blob for blob, _ in packed]), sums, torch.stack([scales for _, scales in packed])
        batch = [self._read_expert(layer, expert) for layer, expert in places]
        blobs, tensor_scales = packing.pack(
            layout,
            _stack([one.gate for one in batch], layout.format),
            _stack([one.up for one in batch], layout.format),
            _stack([one.down for one in batch], layout.format),
        )
        return blobs, [checksum(blob) for blob in blobs.numpy()], tensor_scales

    def _read_expert(self, layer: int, expert: int) -> ExpertWeights:
        try:
            return self.source.read_expert(layer, expert)
        except CheckpointError as error:
            raise CheckpointError(f"layer {layer}, expert {expert}: {error.message}", error.hint) from error


def _stack(weights: list[Projection], format: ExpertFormat) -> QuantisedMatrix:
    """One matrix with a leading axis of experts. Weights already in the format are not touched."""
    if all(isinstance(weight, QuantisedMatrix) and weight.format == format for weight in weights):
        matrices = cast(list[QuantisedMatrix], weights)
    else:
        plain = [dequantise(weight) if isinstance(weight, QuantisedMatrix) else weight for weight in weights]
        return packing.quantise(torch.stack(plain), format)
    return QuantisedMatrix(
        format,
        matrices[0].columns,
        torch.stack([matrix.codes for matrix in matrices]),
        torch.stack([matrix.scales for matrix in matrices if matrix.scales is not None]),
        torch.stack([matrix.tensor_scale for matrix in matrices]),
    )


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(data)
