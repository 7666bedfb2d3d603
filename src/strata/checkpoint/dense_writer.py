"""Writes the dense weights of a pack: a safetensors file whose header is known before the first weight is read.

Lives in ``checkpoint``; used by the pack writer alone. Weights pass through in slices of rows, so the largest matrix
never has to fit in memory twice. It must not know families or experts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch

from strata.checkpoint.manifest import DenseTensor
from strata.checkpoint.manifest_check import Q8_BLOCK, SCALES_SUFFIX
from strata.checkpoint.pack_checksum import PIECE_BYTES, combine_pieces
from strata.checkpoint.safetensors_header import DTYPE_BITS, parse_header
from strata.checkpoint.source_model import WeightSource
from strata.checkpoint.weight_map import WeightEntry
from strata.kernels.cpu.checksum import checksum
from strata.kernels.cpu.packing import quantise
from strata.kernels.ops import MatrixFormat

__all__ = ["SLICE_BYTES", "DenseFormats", "DensePlan", "plan_dense", "write_dense"]

SLICE_BYTES = 4 << 20  # of FP32 values at once; quantising holds about five times as much


@dataclass(frozen=True)
class DenseFormats:
    """``dense``: of matrices, embedding, and head; ``hyper``: of hyper-connections. Routers are f32."""

    dense: MatrixFormat = "q8_0"
    hyper: MatrixFormat = "bf16"

    def of(self, entry: WeightEntry) -> MatrixFormat:
        """The format of a matrix entry."""
        if entry.role in ("dense", "embedding", "head"):
            return self.dense
        return self.hyper if entry.role == "hyper" else "f32"


@dataclass(frozen=True)
class _Stored:
    name: str
    dtype: Literal["I64", "F32", "F16", "BF16", "I8"]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class DensePlan:
    """The header, and where each stored tensor begins. ``formats``: f32, bf16, q8_0, or i64 by canonical name."""

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int
    formats: Mapping[str, Literal["f32", "bf16", "q8_0", "i64"]]


def plan_dense(entries: Sequence[WeightEntry], formats: DenseFormats) -> DensePlan:
    """Lays out all entries that have data of their own; tables are not among them."""
    stored: list[_Stored] = []
    chosen: dict[str, Literal["f32", "bf16", "q8_0", "i64"]] = {}
    for entry in entries:
        if entry.kind == "table":
            continue
        if entry.kind == "matrix":
            format = formats.of(entry)
            chosen[entry.name] = format
            own = [] if entry.tied_to else _stored_matrix(entry, format)
        else:
            integers = entry.kind == "integers"
            chosen[entry.name] = "i64" if integers else "f32"
            own = [] if entry.tied_to else [_Stored(entry.name, "I64" if integers else "F32", entry.shape)]
        stored += own
    # Wide types first keeps every tensor aligned without gaps, which the format forbids.
    stored.sort(key=lambda one: -DTYPE_BITS[one.dtype])
    table: dict[str, object] = {}
    offsets: dict[str, int] = {}
    end = 0
    for one in stored:
        table[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [end, end + one.nbytes]}
        offsets[one.name] = end
        end += one.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = len(text).to_bytes(8, "little") + text
    return DensePlan(header, {name: len(header) + at for name, at in offsets.items()}, len(header) + end, chosen)


def _stored_matrix(entry: WeightEntry, format: MatrixFormat) -> list[_Stored]:
    rows, columns = entry.shape
    if format == "q8_0":
        blocks = -(-columns // Q8_BLOCK)
        return [
            _Stored(entry.name, "I8", (rows, blocks * Q8_BLOCK)),
            _Stored(entry.name + SCALES_SUFFIX, "F16", (rows, blocks)),
        ]
    return [_Stored(entry.name, "F32" if format == "f32" else "BF16", entry.shape)]


def write_dense(
    file: IO[bytes], source: WeightSource, plan: DensePlan, done: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Fills ``file`` as planned. ``done`` is told the bytes written so far, in steps."""
    file.write(plan.header)
    for entry in source.entries:
        if entry.kind == "table" or entry.tied_to:
            continue
        width = math.prod(entry.shape[1:])
        at = dict.fromkeys((entry.name, entry.name + SCALES_SUFFIX), 0)
        for rows in source.read_rows(entry.name, max(1, SLICE_BYTES // (4 * max(1, width)))):
            for name, data in _encode(entry, rows, plan.formats[entry.name]):
                file.seek(plan.offsets[name] + at[name])
                data = data.contiguous().reshape(-1).view(torch.uint8)
                file.write(data.numpy().data)
                at[name] += data.numel()
                done(data.numel())


def _encode(entry: WeightEntry, rows: torch.Tensor, format: str) -> Iterator[tuple[str, torch.Tensor]]:
    if format == "q8_0":
        matrix = quantise(rows, "q8_0")
        assert matrix.scales is not None
        missing = -matrix.columns % Q8_BLOCK
        yield entry.name, torch.nn.functional.pad(matrix.codes, (0, missing)) if missing else matrix.codes
        yield entry.name + SCALES_SUFFIX, matrix.scales
    elif format == "i64":
        yield entry.name, rows
    else:
        yield entry.name, rows.to(torch.bfloat16 if format == "bf16" else torch.float32)


def hash_dense(path: Path) -> tuple[str, dict[str, str]]:
    """(sha256 of the file, checksum of each stored tensor), from what was really written."""
    specs, _ = parse_header(path)
    digest = hashlib.sha256()
    sums: dict[str, str] = {}
    with path.open("rb") as file:
        first = min((spec.offset for spec in specs.values()), default=path.stat().st_size)
        digest.update(file.read(first))
        for spec in sorted(specs.values(), key=lambda spec: (spec.offset, spec.nbytes)):
            pieces = []
            for start in range(0, spec.nbytes, PIECE_BYTES):
                piece = file.read(min(PIECE_BYTES, spec.nbytes - start))
                digest.update(piece)
                pieces.append(checksum(piece))
            sums[spec.name] = combine_pieces(pieces)
    return digest.hexdigest(), sums


def describe_dense(source: WeightSource, plan: DensePlan, sums: Mapping[str, str]) -> dict[str, DenseTensor]:
    """The manifest's section about the dense weights."""
    described = {}
    for entry in source.entries:
        if entry.kind == "table":
            continue
        names = () if entry.tied_to else (entry.name, entry.name + SCALES_SUFFIX)
        described[entry.name] = DenseTensor(
            kind=entry.kind,
            format=plan.formats[entry.name],
            shape=list(entry.shape),
            checksums={name: sums[name] for name in names if name in sums},
            parts=source.parts(entry.name),
            source_columns=entry.columns,
            tied_to=entry.tied_to,
        )
    return described
