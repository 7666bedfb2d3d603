"""Reads tensors of a safetensors checkpoint, sharded or not, straight from its files.

Lives in ``checkpoint``; plain positioned reads instead of a memory map keep the resident size at what the
caller holds, and let a slice of a fused tensor be read alone. It knows names and bytes; what a tensor is
for, and whether all of them were wanted, is decided in ``source_model``.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from strata.checkpoint.recognise import find_checkpoint, unreadable
from strata.checkpoint.safetensors_header import TensorSpec, parse_header
from strata.checkpoint.weight_memory import ByteArray, TakeMemory, fresh_memory
from strata.errors import CheckpointError
from strata.files import open_regular, read_regular

__all__ = ["Checkpoint", "list_names", "read_bytes", "read_json_object"]

INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<total>\d{5,6})\.safetensors")

_TORCH_TYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


class Checkpoint:
    """The tensors of one checkpoint folder by name. Owns its open files; ``close()`` or ``with`` ends them.
    Several threads may read at once.

    ``specs`` holds every tensor of every shard, checked against the index and the headers;
    ``config`` is the parsed config.json; ``bytes_read`` counts what ``read`` has taken from the files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_checkpoint(folder)
        self.config = read_json_object(self.folder / "config.json")
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self.specs: dict[str, TensorSpec] = _collect(self.folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start`` to ``stop`` along axis 0 (all when omitted) in the type of the file, owned by the caller.

        Raises ``CheckpointError`` when the file ends early, the type is one torch lacks, or memory is short.
        """
        spec = self.specs[name]
        dtype = _TORCH_TYPES.get(spec.dtype)
        if dtype is None:
            raise CheckpointError(f"{spec.path}: tensor {name!r} is of type {spec.dtype}, which is not read")
        shape = spec.shape
        offset, nbytes = spec.offset, spec.nbytes
        if shape and (start != 0 or stop is not None):
            stop = shape[0] if stop is None else stop
            assert 0 <= start <= stop <= shape[0]
            row_bytes = nbytes // shape[0] if shape[0] else 0
            offset, nbytes = offset + start * row_bytes, (stop - start) * row_bytes
            shape = (stop - start, *shape[1:])
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            self.bytes_read += nbytes
        data = read_bytes(self._file(spec.path), offset, nbytes, f"{spec.path}: tensor {name!r}")
        return torch.from_numpy(data).view(dtype).reshape(shape)

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = open_regular(path)
                except OSError as error:
                    raise unreadable(path, error) from error
            return self._files[path]

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_bytes(descriptor: int, offset: int, nbytes: int, what: str, memory: TakeMemory = fresh_memory) -> ByteArray:
    """Exactly ``nbytes`` of an open file, in ``memory``. ``what`` opens the error's line."""
    try:
        data = memory(nbytes)
    except MemoryError as error:
        raise CheckpointError(
            f"{what} needs {nbytes} bytes of memory, which the system refused",
            "the file is not damaged: raise the limit of memory (ulimit -v, ulimit -d), or close other programs",
        ) from error
    view = data.data
    done = 0
    while done < nbytes:
        try:
            count = _read_into(descriptor, view[done : done + (1 << 30)], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{what} cannot be read: {error.strerror}", "look at the disk that it lies on"
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{what} is cut short: {done} of {nbytes} bytes could be read", "fetch the file again"
            )
        done += count
    return data


_no_preadv = threading.Lock()


def _read_into(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _no_preadv:  # the file's position is shared by its readers
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error})", "fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", "fetch the file again")
    return value


def list_names(names: Iterable[str], limit: int = 6) -> str:
    """Up to ``limit`` names for a one-line message, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _collect(folder: Path) -> dict[str, TensorSpec]:
    """Every tensor of the folder, once. The index, where there is one, must agree with the shards to the name."""
    files = sorted(path for path in folder.glob("*.safetensors"))
    index_path = folder / INDEX_FILE
    index = _read_index(index_path) if index_path.exists() else None
    if index is None:
        _check_numbering(folder, [path.name for path in files])
    else:
        _check_shards(folder, index, {path.name for path in files})
    specs: dict[str, TensorSpec] = {}
    for path in files:
        for name, spec in parse_header(path)[0].items():
            if name in specs:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in {specs[name].path.name} and in {path.name}",
                    "move the file that does not belong to the checkpoint away",
                )
            specs[name] = spec
    if index is not None:
        _check_index(folder, index, specs)
    return specs


def _read_index(path: Path) -> dict[str, str]:
    index = read_json_object(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise CheckpointError(f"{path} has no weight_map of names to files", "fetch the index again")
    outside = sorted({shard for shard in index.values() if Path(shard).name != shard})
    if outside:
        raise CheckpointError(f"{path} names files outside of its folder: {list_names(outside)}")
    return index


def _check_shards(folder: Path, index: dict[str, str], present: set[str]) -> None:
    wanted = set(index.values())
    if wanted - present:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} names {len(wanted - present)} missing files: {list_names(wanted - present)}",
            "fetch them again",
        )
    if present - wanted:
        raise CheckpointError(
            f"{folder}: {list_names(present - wanted)} is not named in {INDEX_FILE}",
            "move files that do not belong to the checkpoint away, or fetch the index again",
        )


def _check_index(folder: Path, index: dict[str, str], specs: dict[str, TensorSpec]) -> None:
    absent = set(index) - set(specs)
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} tensors of {INDEX_FILE} are in no file: {list_names(absent)}",
            "fetch the files again",
        )
    unlisted = set(specs) - set(index)
    if unlisted:
        raise CheckpointError(
            f"{folder}: {len(unlisted)} tensors are not in {INDEX_FILE}: {list_names(unlisted)}",
            "fetch the index again",
        )
    for name, shard in index.items():
        if specs[name].path.name != shard:
            raise CheckpointError(
                f"{folder}: tensor {name!r} is in {specs[name].path.name}, {INDEX_FILE} says {shard}",
                "fetch the index and the files again",
            )


def _check_numbering(folder: Path, names: list[str]) -> None:
    """Without an index, shards that count themselves must be complete and of one set."""
    matches = [match for match in (_SHARD_NAME.fullmatch(name) for name in names) if match]
    sets = {(match["stem"], match["total"]) for match in matches}
    for stem, total in sorted(sets):
        numbers = {int(match["number"]) for match in matches if (match["stem"], match["total"]) == (stem, total)}
        missing = set(range(1, int(total) + 1)) - numbers
        if missing:
            width = len(total)
            some = [f"{stem}-{number:0{width}d}-of-{total}.safetensors" for number in sorted(missing)[:6]]
            raise CheckpointError(
                f"{folder}: {len(missing)} of {int(total)} shards are missing: {list_names(some)}", "fetch them again"
            )
    if len({stem for stem, _ in sets}) < len(sets):
        raise CheckpointError(
            f"{folder} holds shards of two sets: {', '.join(f'{stem} of {total}' for stem, total in sorted(sets))}",
            "move the set that does not belong to the checkpoint away",
        )
