"""The manifest of a Strata pack: what the pack holds, in which formats, and how every byte of it is checked.

Lives in ``checkpoint``; writer, reader, and export share it. A digest covers the manifest's own bytes, sizes and
sha256 the small files, 64-bit checksums the large ones, so any changed byte is found at load or at first use.
It knows no family: names of weights are data here. See docs/reference/pack-format.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from strata.checkpoint.recognise import MANIFEST_FILE, PACK_FORMAT_NAME, unreadable
from strata.errors import CheckpointError
from strata.files import open_regular
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
    "check_file_name",
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


_MANIFEST_LIMIT = 256 << 20  # bytes; a thousand times a real one
_NAME_BYTES = 255  # what file systems take


def check_file_name(name: str) -> str:
    """``name``, which is one of a file beside the manifest. Raises ``ValueError`` for any other path."""
    if name in ("", ".", "..") or any(letter in name for letter in "/\\:") or not name.isprintable():
        raise ValueError(f"{shown(name)} is not a plain file name")
    if len(name.encode("utf-8", "surrogatepass")) > _NAME_BYTES:
        raise ValueError(f"{shown(name)} is longer than {_NAME_BYTES} bytes")
    return name


def shown(text: str) -> str:
    """``text`` for a one-line message: quoted, cut, and without characters that a terminal would act on."""
    return repr(text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}")


_INT_LIMIT = (1 << 31) - 1  # sizes along one axis, and counts
_Count = Annotated[int, Field(ge=1, le=_INT_LIMIT)]
_Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
_Width = Annotated[int, Field(ge=1, le=1 << 20)]
_FileName = Annotated[str, AfterValidator(check_file_name)]
_Words = Annotated[str, Field(max_length=_NAME_BYTES, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
_Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
# JSON has lists alone; what is in them stays strict.
_Part = Annotated[tuple[_Name, _Count], Field(strict=False)]
_Parts = Annotated[list[_Part], Field(max_length=1 << 20)]
_Column = Annotated[int, Field(ge=0, le=_INT_LIMIT)]
_Columns = Annotated[tuple[_Column, _Column], Field(strict=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Strict):
    """A file that is checked whole."""

    nbytes: _Bytes
    sha256: _Sha256


class DenseTensor(_Strict):
    """One canonical weight. ``format`` is that of a matrix, or f32 / i64 of a plain tensor.

    ``checksums`` of its stored tensors by name (piecewise, see ``pack_checksum``); ``parts``: the source's tensor names
    with their rows, for export. A tied weight has no tensors of its own.
    """

    kind: Literal["matrix", "vector", "conv", "integers"]
    format: Literal["f32", "bf16", "q8_0", "i64"]
    shape: list[_Count] = Field(max_length=2)
    checksums: dict[_Name, _Sum] = Field(max_length=2)
    parts: _Parts
    source_columns: _Columns | None = None
    tied_to: _Name | None = None


class TableRecord(_Strict):
    """A row-gathered table in its own file: ``rows`` rows of ``row_bytes`` bytes, each with its own check word."""

    file: _FileName
    format: Literal["f32", "bf16", "q8_0", "f8_e4m3"]
    rows: _Count
    columns: _Count
    row_bytes: int = Field(ge=1, le=1 << 34)
    parts: _Parts


class ExpertNames(_Strict):
    """Source names of one layer's experts, with ``{expert}``, for export."""

    gate: _Name
    up: _Name
    down: _Name


class ExpertsSection(_Strict):
    """Blob ``position * num_experts + expert`` (position of the layer in ``layers``) of the files in order."""

    format: Literal["nvfp4", "q8_0", "bf16"]
    layout: _Count
    hidden: _Width
    intermediate: _Width
    num_experts: _Count
    blob_bytes: int = Field(ge=4096, le=1 << 44, multiple_of=4096)
    blobs_per_file: _Count
    layers: list[Annotated[int, Field(ge=0, le=_INT_LIMIT)]] = Field(min_length=1, max_length=1 << 16)
    names: list[ExpertNames] = Field(min_length=1, max_length=1 << 16)
    files: list[_FileName] = Field(max_length=1 << 20)


class Manifest(_Strict):
    """See the module's page. ``config`` is the source's config.json word for word; ``files`` are checked whole.

    Every field is bounded here; what they say together is checked by ``manifest_check``."""

    format: Literal["strata-pack"]
    version: _Count
    needs: _Words
    written_by: _Words
    family: _Name
    source_name: _Words
    config: dict[str, Any]
    absent_groups: list[_Name] = Field(max_length=1 << 16)
    dense: dict[_Name, DenseTensor] = Field(max_length=1 << 20)
    tables: dict[_Name, TableRecord] = Field(max_length=1 << 16)
    experts: ExpertsSection | None
    tokenizer_files: list[_FileName] = Field(max_length=1 << 10)
    files: dict[_FileName, FileRecord] = Field(max_length=1 << 11)
    manifest_sha256: _Sha256 = _NO_DIGEST.decode()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's file with its digest in it."""
    text = json.dumps(manifest.model_dump(), indent=1, ensure_ascii=False).encode()
    assert text.count(_DIGEST_KEY + _NO_DIGEST) == 1
    digest = hashlib.sha256(text).hexdigest().encode()
    return text.replace(_DIGEST_KEY + _NO_DIGEST, _DIGEST_KEY + digest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pack, its digest and every field checked, an older one upgraded. Raises ``CheckpointError``.

    What the fields say together, and of which family, is checked by ``manifest_check``."""
    path = folder / MANIFEST_FILE
    again = "make the pack again with strata pack"
    raw = _check_digest(path, _read(path, again), again)
    version = raw.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= _INT_LIMIT:
        raise CheckpointError(f"{path}: the format number is {shown(str(version))}", again)
    if version > FORMAT_NUMBER:
        needs = raw.get("needs")
        newer = needs if isinstance(needs, str) and needs.isprintable() and len(needs) < 80 else "of a newer version"
        raise CheckpointError(
            f"{folder} has pack format {version}, this Strata {VERSION} reads up to {FORMAT_NUMBER}",
            f"update to Strata {newer} or later",
        )
    while raw["version"] < FORMAT_NUMBER:
        upgrade = UPGRADES.get(raw["version"])
        if upgrade is None:
            raise CheckpointError(f"{folder} has pack format {raw['version']}, which is no longer read", again)
        raw = upgrade(raw)
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(shown(str(part))[1:-1] for part in first["loc"])
        raise CheckpointError(f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}", again) from error


def _read(path: Path, again: str) -> bytes:
    try:
        with os.fdopen(open_regular(path, follow=False), "rb") as file:
            data = file.read(_MANIFEST_LIMIT + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > _MANIFEST_LIMIT:
        raise CheckpointError(f"{path} is larger than {_MANIFEST_LIMIT:,} bytes, which no pack needs", again)
    return data


def _check_digest(path: Path, data: bytes, again: str) -> dict[str, Any]:
    start = data.find(_DIGEST_KEY)
    place = slice(start + len(_DIGEST_KEY), start + len(_DIGEST_KEY) + len(_NO_DIGEST))
    digest = data[place]
    body = data[: place.start] + _NO_DIGEST + data[place.stop :]
    if start < 0 or hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged: its sha256 does not match", again)
    try:
        raw = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON as a pack has it: {error}", again) from error
    if not isinstance(raw, dict) or raw.get("format") != PACK_FORMAT_NAME:
        raise CheckpointError(f"{path} is not the manifest of a Strata pack", again)
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return found
