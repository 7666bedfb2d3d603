"""A strict parser of the safetensors header: every number is checked before a byte of data is read.

Lives in ``checkpoint``; own code because a damaged or hostile header must end in an error that names
the file, the tensor, and the numbers, and because tensors are read in slices straight from the file.
It must not know what a tensor is for, and never imports torch.

Source: the safetensors format (8 bytes little-endian header size, JSON, data; no gaps, no overlap).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.checkpoint.recognise import unreadable
from strata.errors import CheckpointError
from strata.files import open_regular

__all__ = ["DTYPE_BITS", "TensorSpec", "parse_header"]

HEADER_LIMIT = 100_000_000  # bytes; the limit of the format
DIMENSION_LIMIT = 8

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file. ``offset`` counts from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def parse_header(path: Path, descriptor: int | None = None) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """(tensors by name in file order, metadata) of ``path``, or of the open file ``descriptor`` of that name, whose
    position it moves. Raises ``CheckpointError`` on anything unsound."""
    try:
        with os.fdopen(open_regular(path) if descriptor is None else os.dup(descriptor), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is {size} bytes: too short for a safetensors header", _AGAIN)
            length = int.from_bytes(prefix, "little")
            if length > HEADER_LIMIT:
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes, more than the limit of {HEADER_LIMIT}", _AGAIN
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is cut short: the header needs bytes 8 to {8 + length}, the file ends at {size}", _AGAIN
                )
            text = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    entries = _parse_json(path, text)
    metadata = _take_metadata(path, entries)
    specs = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, specs, 8 + length, size)
    return specs, metadata


_AGAIN = "fetch the file again"


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: the header names {twice!r} twice", _AGAIN)
        return result

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error})", _AGAIN) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object", _AGAIN)
    return entries


def _take_metadata(path: Path, entries: dict[str, Any]) -> dict[str, str]:
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of strings", _AGAIN)
    return metadata


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorSpec:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} does not have exactly dtype, shape, and data_offsets", _AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has the unknown type {dtype!r}", f"known: {', '.join(DTYPE_BITS)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where} has the shape {shape!r}: sizes are whole numbers from 0 to 2^63-1", _AGAIN)
    if len(shape) > DIMENSION_LIMIT:
        raise CheckpointError(f"{where} has {len(shape)} dimensions, the limit is {DIMENSION_LIMIT}", _AGAIN)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has the data_offsets {offsets!r}: two rising whole numbers are needed", _AGAIN)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    nbytes = offsets[1] - offsets[0]
    if bits != nbytes * 8:
        raise CheckpointError(
            f"{where} of type {dtype} and shape {shape} needs {-(-bits // 8)} bytes, its offsets span {nbytes}", _AGAIN
        )
    return TensorSpec(name, dtype, tuple(shape), data_start + offsets[0], nbytes, path)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_layout(path: Path, specs: dict[str, TensorSpec], data_start: int, size: int) -> None:
    """Tensors must tile the data exactly: no gap, no overlap, not a byte missing or left over."""
    end, before = data_start, ""
    for spec in sorted(specs.values(), key=lambda spec: (spec.offset, spec.nbytes)):
        if spec.offset != end:
            what = "overlaps" if spec.offset < end else "leaves a gap after"
            neighbour = f"tensor {before!r}" if before else "the header"
            raise CheckpointError(
                f"{path}: tensor {spec.name!r} {what} {neighbour} (starts at byte {spec.offset}, not {end})", _AGAIN
            )
        end, before = spec.offset + spec.nbytes, spec.name
        if end > size:
            raise CheckpointError(
                f"{path} is cut short: tensor {spec.name!r} needs bytes {spec.offset} to {end}, "
                f"the file ends at {size}",
                _AGAIN,
            )
    if end != size:
        raise CheckpointError(f"{path} has {size - end} bytes after its last tensor", _AGAIN)
