"""Reads a Strata pack: dense weights into memory, and where each expert's blob lies.

Lives in ``checkpoint``. Opening checks the manifest, every file's size, and the small files; dense weights are checked
as they are read; blobs and table rows by whoever reads them first (``BlobLocation.checksum``); ``check`` reads all.
It must not know families, tiers, or backends.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from strata.checkpoint.in_order import in_order
from strata.checkpoint.manifest import DENSE_FILE, EXPERT_TABLES_FILE, DenseTensor, Manifest, TableRecord, read_manifest
from strata.checkpoint.manifest_check import (
    SCALES_SUFFIX,
    MapOfFamily,
    check_family,
    check_manifest,
    stored_tensors,
)
from strata.checkpoint.pack_checksum import tensor_checksum
from strata.checkpoint.pack_writer import LAYOUT_NUMBER
from strata.checkpoint.recognise import MANIFEST_FILE, find_pack, unreadable
from strata.checkpoint.safetensors_header import TensorSpec, parse_header
from strata.checkpoint.safetensors_reader import list_names, read_bytes
from strata.checkpoint.stored_weight import is_finite
from strata.checkpoint.table_rows import TableFile
from strata.checkpoint.tensor_scales import check_tensor_scales
from strata.checkpoint.weight_memory import ReusedMemory, TakeMemory, fresh_memory
from strata.errors import CheckpointError
from strata.files import open_regular
from strata.kernels.cpu.checksum import checksum
from strata.kernels.cpu.synthetic import BlobRecipe
from strata.kernels.ops import Matrix
from strata.quant.blocks import dequantise
from strata.quant.layout import ExpertLayout

__all__ = ["BlobLocation", "PackReader"]

DenseWeight = Matrix | torch.Tensor | TableFile

_TORCH_TYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}
_AGAIN = "make the pack again with strata pack"
_PIECE = 16 << 20  # bytes that a sha256 takes at once


@dataclass(frozen=True)
class BlobLocation:
    """Where one expert's blob lies: ``nbytes`` at ``offset`` of ``path``, both whole pages. Whoever reads it first
    compares ``strata.kernels.cpu.checksum`` of the blob with ``checksum``. With a ``recipe`` it lies nowhere: it is
    computed, and has no checksum."""

    path: Path
    offset: int
    nbytes: int
    checksum: int | None
    recipe: BlobRecipe | None = None


class PackReader:
    """An open pack. Owns its open files and tables; ``close()`` or ``with`` ends them, weights stay valid but tables.

    ``find_family`` maps the pack's config to its family, whose weights must be those of the manifest; without it the
    manifest is held against itself and the files alone. Raises ``CheckpointError`` for whatever does not fit.

    ``layout`` and ``expert_layers`` describe the experts (None and empty without any); ``tensor_scales`` is FP32
    L x E x 3 (gate, up, down) and ``checksums`` uint64 L x E, L counting ``expert_layers``.
    """

    def __init__(self, path: str | Path, find_family: Callable[[Mapping[str, Any]], MapOfFamily] | None = None) -> None:
        self.folder = find_pack(path)
        self.manifest: Manifest = read_manifest(self.folder)
        check_manifest(self.folder, self.manifest)
        if find_family is not None:
            check_family(self.folder, self.manifest, find_family)
        self._files: dict[Path, int] = {}
        self._tables: dict[str, TableFile] = {}
        self.layout: ExpertLayout | None = None
        self.expert_layers: tuple[int, ...] = ()
        self.tensor_scales = torch.empty(0, 0, 3)
        self.checksums: np.ndarray[Any, np.dtype[np.uint64]] = np.empty((0, 0), dtype=np.uint64)
        try:
            self._check_files()
            self._dense_specs = self._check_dense()
            self._open_experts()
        except BaseException:
            self.close()
            raise

    @property
    def family(self) -> str:
        return self.manifest.family

    @property
    def config(self) -> dict[str, Any]:
        """The source's config.json word for word."""
        return self.manifest.config

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that tell this model from every other: what is learned about it is kept under them."""
        return self.manifest.manifest_sha256

    @property
    def links(self) -> dict[str, str]:
        """Files of the pack that are links, which only experts and tables may be, and where they lead."""
        return {path.name: os.readlink(path) for path in self._listed() if path.is_symlink()}

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 without any."""
        return self.manifest.experts.num_experts if self.manifest.experts else 0

    @property
    def dense_bytes(self) -> int:
        """Bytes of memory that ``load_dense`` takes, for a plan."""
        return sum(spec.nbytes for spec in self._dense_specs.values())

    @property
    def dense_file(self) -> Path | None:
        """The file that ``load_dense`` reads from its first byte to its last, about in order; None where weights are
        computed."""
        return self.folder / DENSE_FILE

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of the pack."""
        return sum(path.stat().st_size for path in self._listed())

    def matrix_bytes(self, name: str) -> int:
        """Bytes of one canonical dense weight in memory; 0 for a tied one and for a table."""
        return sum(spec.nbytes for key in (name, name + SCALES_SUFFIX) if (spec := self._dense_specs.get(key)))

    def load_dense(
        self,
        progress: Callable[[int, int], None] | None = None,
        place: Callable[[DenseWeight], DenseWeight] | None = None,
    ) -> dict[str, DenseWeight]:
        """All dense weights by canonical name, checked, in fresh memory: ``Matrix``, FP32 or int64 tensors, and
        ``TableFile`` for tables (open until ``close``). A tied weight is the same object as what it is tied to.

        ``place`` moves each one (tables stay) on the thread that has read it; what it was given is not kept."""
        weights: dict[str, DenseWeight] = {}
        done, total = 0, self.dense_bytes
        own = [name for name, record in self.manifest.dense.items() if record.tied_to is None]
        names = [*self.manifest.tables, *own]  # tables first: a computed one takes long, and others go on beside it
        self._begin_dense()

        held = threading.local()

        def load(name: str) -> DenseWeight:
            if place is None:
                return self.load_weight(name)
            memory = vars(held).setdefault("memory", ReusedMemory())
            memory.restart()
            return place(self.load_weight(name, memory.take))

        # All at once: nobody waits for a large one, and what is kept is kept anyway.
        for name, weight in zip(names, in_order(load, names, len(names)), strict=True):
            weights[name] = weight
            done += self.matrix_bytes(name)
            if progress is not None:
                progress(done, total)
        for name, record in self.manifest.dense.items():
            if record.tied_to is not None:
                weights[name] = weights[record.tied_to]
        return weights

    def _begin_dense(self) -> None:
        """Before threads ask for weights."""
        self._open(self.folder / DENSE_FILE)

    def load_weight(self, name: str, memory: TakeMemory = fresh_memory) -> DenseWeight:
        """One canonical dense weight, checked, in ``memory``; a table is opened once and stays the reader's."""
        record = self.manifest.dense.get(name)
        if record is not None:
            return self._load_weight(record.tied_to or name, self.manifest.dense[record.tied_to or name], memory)
        if name not in self._tables:
            self._tables[name] = self._new_table(self.manifest.tables[name])
        return self._tables[name]

    def read_tokenizer_file(self, name: str) -> bytes:
        """One of ``manifest.tokenizer_files``, checked."""
        path = self.folder / name
        descriptor = self._open(path)
        data = read_bytes(descriptor, 0, os.fstat(descriptor).st_size, str(path)).tobytes()
        record = self.manifest.files.get(name)
        if record is not None and hashlib.sha256(data).hexdigest() != record.sha256:
            raise CheckpointError(f"{path} is damaged: its sha256 does not match", _AGAIN)
        return data

    def expert_location(self, layer: int, expert: int) -> BlobLocation:
        """Where the blob of an expert lies. ``layer`` is one of ``expert_layers``."""
        experts = self.manifest.experts
        assert experts is not None
        position = self._positions[layer]
        assert 0 <= expert < experts.num_experts
        index = position * experts.num_experts + expert
        number, place = divmod(index, experts.blobs_per_file)
        return BlobLocation(
            self.folder / experts.files[number],
            place * experts.blob_bytes,
            experts.blob_bytes,
            int(self.checksums[position, expert]),
        )

    def read_expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(blob uint8 [blob_bytes], tensor scales FP32 [3]), checked, in fresh memory."""
        where = self.expert_location(layer, expert)
        what = f"{where.path}: layer {layer}, expert {expert}"
        blob = read_bytes(self._open(where.path), where.offset, where.nbytes, what)
        if checksum(blob) != where.checksum:
            raise CheckpointError(f"{what} is damaged: its checksum does not match", _AGAIN)
        return torch.from_numpy(blob), self.tensor_scales[self._positions[layer], expert]

    def check(self, progress: Callable[[str, int, int], None] | None = None) -> int:
        """Reads and checks every byte of the pack; returns how many. Raises ``CheckpointError`` at the first damage."""
        total = self.total_bytes
        done = (self.folder / MANIFEST_FILE).stat().st_size

        def step(what: str, nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(what, done, total)

        for name, record in self.manifest.files.items():
            self._check_sha256(name, record.sha256)
            step(name, record.nbytes)
        for name, dense in self.manifest.dense.items():
            if dense.tied_to is None:
                self._load_weight(name, dense)
        for table in self.manifest.tables.values():
            with self._new_table(table) as opened:
                step(table.file, opened.check())
        for layer in self.expert_layers:
            for expert in range(self.num_experts):
                blob, scales = self.read_expert(layer, expert)
                assert self.layout is not None
                where = f"{self.folder}: layer {layer}, expert {expert}"
                self.layout.check(blob.unsqueeze(0), scales.unsqueeze(0), where)
                step(f"layer {layer}", blob.numel())
        return done

    def close(self) -> None:
        """Closes files and tables."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        for table in self._tables.values():
            table.close()
        self._tables.clear()

    def __enter__(self) -> PackReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listed(self) -> list[Path]:
        experts = self.manifest.experts.files if self.manifest.experts else []
        tables = [table.file for table in self.manifest.tables.values()]
        return [self.folder / name for name in (MANIFEST_FILE, *self.manifest.files, *tables, *experts)]

    def _check_files(self) -> None:
        """Sizes of all files, and the sha256 of the small ones (the dense file is checked tensor by tensor)."""
        wanted = {name: record.nbytes for name, record in self.manifest.files.items()}
        wanted |= {table.file: table.rows * table.row_bytes for table in self.manifest.tables.values()}
        experts = self.manifest.experts
        if experts is not None:
            blobs = len(experts.layers) * experts.num_experts
            for number, name in enumerate(experts.files):
                here = min(experts.blobs_per_file, blobs - number * experts.blobs_per_file)
                wanted[name] = here * experts.blob_bytes
        sizes = {name: self._size_of(self.folder / name) for name in wanted}
        missing = [name for name, size in sizes.items() if size is None]
        if missing:
            raise CheckpointError(f"{self.folder}: {len(missing)} files are missing: {list_names(missing)}", _AGAIN)
        for name, nbytes in wanted.items():
            if sizes[name] != nbytes:
                raise CheckpointError(f"{self.folder / name} is {sizes[name]} bytes, {nbytes} are needed", _AGAIN)
        for name, record in self.manifest.files.items():
            if name != DENSE_FILE:
                self._check_sha256(name, record.sha256)

    def _size_of(self, path: Path) -> int | None:
        """Bytes of a file, None where it is missing. A small one stays open, so that it is what was looked at."""
        try:
            if path.name in self.manifest.files:
                return os.fstat(self._open(path)).st_size
            descriptor = open_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _check_sha256(self, name: str, expected: str) -> None:
        path = self.folder / name
        descriptor, digest = self._open(path), hashlib.sha256()
        size = os.fstat(descriptor).st_size
        for start in range(0, size, _PIECE):
            digest.update(read_bytes(descriptor, start, min(_PIECE, size - start), str(path)).data)
        if digest.hexdigest() != expected:
            raise CheckpointError(f"{path} is damaged: its sha256 does not match", _AGAIN)

    def _check_dense(self) -> dict[str, TensorSpec]:
        """The tensors of the dense file, which are exactly those that the manifest describes."""
        path = self.folder / DENSE_FILE
        specs, _ = parse_header(path, self._open(path))
        left = set(specs)
        for name, record in self.manifest.dense.items():
            wanted = stored_tensors(name, record)
            for key, (dtype, shape) in wanted.items():
                spec = specs.get(key)
                if spec is None or (spec.dtype, spec.shape) != (dtype, shape) or key not in record.checksums:
                    raise CheckpointError(f"{path}: {key!r} is not {dtype} {list(shape)}", _AGAIN)
            if len(record.checksums) != len(wanted):
                raise CheckpointError(f"{path}: {name!r} has checksums of {list_names(record.checksums)}", _AGAIN)
            left -= set(wanted)
        if left:
            raise CheckpointError(f"{path}: {len(left)} tensors are left over: {list_names(left)}", _AGAIN)
        return specs

    def _open_experts(self) -> None:
        experts = self.manifest.experts
        if experts is None:
            self._positions: dict[int, int] = {}
            return
        self.layout = ExpertLayout(experts.hidden, experts.intermediate, experts.format)
        if experts.layout != LAYOUT_NUMBER or self.layout.blob_bytes != experts.blob_bytes:
            raise CheckpointError(
                f"{self.folder} has expert layout {experts.layout} ({experts.blob_bytes} bytes a blob), "
                f"read is {LAYOUT_NUMBER} ({self.layout.blob_bytes})",
                _AGAIN,
            )
        self.expert_layers = tuple(experts.layers)
        self._positions = {layer: position for position, layer in enumerate(experts.layers)}
        path = self.folder / EXPERT_TABLES_FILE
        specs, _ = parse_header(path, self._open(path))
        count = (len(experts.layers), experts.num_experts)
        needed = {"tensor_scales": ("F32", (*count, 3)), "checksums": ("I64", count)}
        found = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
        if found != needed:
            words = ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in needed.items())
            raise CheckpointError(f"{path} does not hold {words} and nothing else", _AGAIN)
        self.tensor_scales = self._read_tensor(specs["tensor_scales"])
        self.checksums = self._read_tensor(specs["checksums"]).numpy().view(np.uint64)
        check_tensor_scales(path, self.tensor_scales, experts.layers, experts.format, self._is_zero)

    def _is_zero(self, layer: int, expert: int, place: int) -> bool:
        assert self.layout is not None
        blob, scales = self.read_expert(layer, expert)
        matrix = self.layout.unpack(blob.unsqueeze(0), scales.unsqueeze(0))[place]
        return not bool(dequantise(matrix).any())

    def _open(self, path: Path) -> int:
        """The file's descriptor, opened once. Files of experts may be links, the small ones may not."""
        if path not in self._files:
            experts = self.manifest.experts
            follow = experts is not None and path.name in experts.files
            try:
                self._files[path] = open_regular(path, follow=follow)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise unreadable(path, error) from error
        return self._files[path]

    def _read_tensor(
        self, spec: TensorSpec, expected: str | None = None, memory: TakeMemory = fresh_memory
    ) -> torch.Tensor:
        what = f"{spec.path}: tensor {spec.name!r}"
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=_TORCH_TYPES[spec.dtype])
        data = read_bytes(self._open(spec.path), spec.offset, spec.nbytes, what, memory)
        if expected is not None and tensor_checksum(data) != expected:
            raise CheckpointError(f"{what} is damaged: its checksum does not match", _AGAIN)
        return torch.from_numpy(data).view(_TORCH_TYPES[spec.dtype]).reshape(spec.shape)

    def _load_weight(self, name: str, record: DenseTensor, memory: TakeMemory = fresh_memory) -> Matrix | torch.Tensor:
        read = {}
        for key in stored_tensors(name, record):
            read[key] = self._read_tensor(self._dense_specs[key], record.checksums[key], memory)
            if read[key].is_floating_point() and not is_finite(read[key]):
                where = f"{self.folder / DENSE_FILE}: tensor {key!r}"
                raise CheckpointError(f"{where} holds values that are not finite", _AGAIN)
        if record.kind != "matrix":
            return read[name]
        assert record.format != "i64"
        return Matrix(record.format, read[name], record.shape[1], read.get(name + SCALES_SUFFIX))

    def _new_table(self, table: TableRecord) -> TableFile:
        return TableFile(self.folder / table.file, table.rows, table.columns, table.format)
