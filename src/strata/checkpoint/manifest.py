"""The manifest of a Strata pack: what the pack holds, in which formats, and how every byte of it is checked.

Lives in ``checkpoint``; writer, reader, and export share it. A digest covers the manifest's own bytes, sizes and
sha256 the small files, 64-bit checksums the large ones, so any changed byte is found at load or at first use.
It knows no family: names of weights are data here. See docs/reference/pack-format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strata.checkpoint.recognise import MANIFEST_FILE, PACK_FORMAT_NAME, unreadable
from strata.errors import CheckpointError
from strata.version import VERSION

__all__ = [
    "DENSE_FILE",
    "EXPERT_TABLES_FILE",
    "FORMAT_NUMBER",
    "DenseTensor",
    "ExpertNames",
    "ExpertsSection",
    "FileRecord",
    "Manifest",
    "TableRecord",
    "encode_manifest",
    "read_manifest",
]

FORMAT_NUMBER = 1
NEEDS_VERSION = "0.1.0"  # the first Strata that reads FORMAT_NUMBER
DENSE_FILE = "dense.safetensors"
EXPERT_TABLES_FILE = "expert-tables.safetensors"
_DIGEST_KEY = b'"manifest_sha256": "'
_NO_DIGEST = b"0" * 64

# From a format number to the function that turns its manifest into the next one's.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Strict):
    """A file that is checked whole."""

    nbytes: int = Field(ge=0)
    sha256: str


class DenseTensor(_Strict):
    """One canonical weight. ``format`` is that of a matrix, or f32 / i64 of a plain tensor.

    ``checksums`` of its stored tensors by name (piecewise, see ``pack_checksum``); ``parts``: the source's tensor names
    with their rows, for export. A tied weight has no tensors of its own.
    """

    kind: Literal["matrix", "vector", "conv", "integers"]
    format: Literal["f32", "bf16", "q8_0", "i64"]
    shape: list[int]
    checksums: dict[str, str]
    parts: list[tuple[str, int]]
    source_columns: tuple[int, int] | None = None
    tied_to: str | None = None


class TableRecord(_Strict):
    """A row-gathered table in its own file: ``rows`` rows of ``row_bytes`` bytes, each with its own check word."""

    file: str
    format: Literal["f32", "bf16", "q8_0", "f8_e4m3"]
    rows: int = Field(ge=1)
    columns: int = Field(ge=1)
    row_bytes: int = Field(ge=1)
    parts: list[tuple[str, int]]


class ExpertNames(_Strict):
    """Source names of one layer's experts, with ``{expert}``, for export."""

    gate: str
    up: str
    down: str


class ExpertsSection(_Strict):
    """Blob ``position * num_experts + expert`` (position of the layer in ``layers``) of the files in order."""

    format: Literal["nvfp4", "q8_0", "bf16"]
    layout: int
    hidden: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    blob_bytes: int = Field(ge=4096, multiple_of=4096)
    blobs_per_file: int = Field(ge=1)
    layers: list[int]
    names: list[ExpertNames]
    files: list[str]


class Manifest(_Strict):
    """See the module's page. ``config`` is the source's config.json word for word; ``files`` are checked whole."""

    format: Literal["strata-pack"]
    version: int
    needs: str
    written_by: str
    family: str
    source_name: str
    config: dict[str, Any]
    absent_groups: list[str]
    dense: dict[str, DenseTensor]
    tables: dict[str, TableRecord]
    experts: ExpertsSection | None
    tokenizer_files: list[str]
    files: dict[str, FileRecord]
    manifest_sha256: str = _NO_DIGEST.decode()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's file with its digest in it."""
    text = json.dumps(manifest.model_dump(), indent=1, ensure_ascii=False).encode()
    assert text.count(_DIGEST_KEY + _NO_DIGEST) == 1
    digest = hashlib.sha256(text).hexdigest().encode()
    return text.replace(_DIGEST_KEY + _NO_DIGEST, _DIGEST_KEY + digest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pack, its digest checked, an older one upgraded. Raises ``CheckpointError``."""
    path = folder / MANIFEST_FILE
    again = "make the pack again with strata pack"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    raw = _check_digest(path, data, again)
    version = raw.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{path}: the format number is {version!r}", again)
    if version > FORMAT_NUMBER:
        raise CheckpointError(
            f"{folder} has pack format {version}, this Strata {VERSION} reads up to {FORMAT_NUMBER}",
            f"update to Strata {raw.get('needs', 'of a newer version')} or later",
        )
    while raw["version"] < FORMAT_NUMBER:
        upgrade = UPGRADES.get(raw["version"])
        if upgrade is None:
            raise CheckpointError(f"{folder} has pack format {raw['version']}, which is no longer read", again)
        raw = upgrade(raw)
    try:
        return Manifest.model_validate(raw, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {place}: {first['msg']}", again) from error


def _check_digest(path: Path, data: bytes, again: str) -> dict[str, Any]:
    start = data.find(_DIGEST_KEY)
    place = slice(start + len(_DIGEST_KEY), start + len(_DIGEST_KEY) + len(_NO_DIGEST))
    digest = data[place]
    body = data[: place.start] + _NO_DIGEST + data[place.stop :]
    if start < 0 or hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged: its sha256 does not match", again)
    raw = json.loads(data)
    if not isinstance(raw, dict) or raw.get("format") != PACK_FORMAT_NAME:
        raise CheckpointError(f"{path} is not the manifest of a Strata pack", again)
    return raw
