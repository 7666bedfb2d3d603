"""Turns a pack back into a Hugging Face checkpoint in BF16, so that no pack is a dead end.

Lives in ``checkpoint``: the inverse of the pack writer. The names of the source are in the manifest, so it knows no
family. What the pack never held (a vision tower) is not in the export either.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from strata.checkpoint.manifest import DenseTensor, TableRecord
from strata.checkpoint.manifest_check import MapOfFamily
from strata.checkpoint.pack_folder import WholeFolder
from strata.checkpoint.pack_reader import DenseWeight, PackReader
from strata.checkpoint.safetensors_reader import INDEX_FILE
from strata.checkpoint.table_rows import TableFile
from strata.errors import CheckpointError
from strata.kernels.ops import Matrix
from strata.quant.blocks import QuantisedMatrix, dequantise

__all__ = ["export_checkpoint", "export_reader", "plain_weight"]

SHARD_BYTES = 4 << 30
_QUANTISATION_KEYS = ("quantization_config", "compression_config")

# One tensor of the export: its name, shape, type, and a function that makes its rows in order.
_Tensor = tuple[str, tuple[int, ...], str, Callable[[], Iterator[torch.Tensor]]]


def export_checkpoint(
    pack: str | Path,
    destination: str | Path,
    *,
    find_family: Callable[[Mapping[str, Any]], MapOfFamily] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """Writes ``destination`` (config, tokenizer, BF16 shards and their index) and returns its folder.

    ``find_family``: see ``PackReader``. Weights are those that the pack stands for, rounded to BF16 once. Raises
    ``CheckpointError`` for a damaged pack and a disk without room; nothing half-written stays.
    """
    with PackReader(pack, find_family) as reader:
        return export_reader(reader, destination, shard_bytes=shard_bytes, progress=progress)


def export_reader(
    reader: PackReader,
    destination: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """See ``export_checkpoint``: of an open pack, or of a model that is computed."""
    exporter = _Exporter(reader)
    tensors = list(exporter.tensors())
    names = [name for name, *_ in tensors]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{reader.folder} names a tensor twice", "make the pack again with strata pack")
    shards = _split_shards(tensors, shard_bytes)
    total = sum(_bytes_of(tensor) for tensor in tensors)
    small = {name: reader.read_tokenizer_file(name) for name in reader.manifest.tokenizer_files}
    with WholeFolder(destination, total + sum(map(len, small.values())) + 1024 * (len(tensors) + 64)) as folder:
        done = 0
        for number, shard in enumerate(shards, start=1):
            file = _shard_name(number, len(shards))
            folder.write(file, lambda opened, shard=shard: _write_shard(opened, shard))  # type: ignore[misc]
            done += sum(_bytes_of(tensor) for tensor in shard)
            if progress is not None:
                progress(file, done, total)
        for name, data in small.items():
            folder.write(name, lambda opened, data=data: _put(opened, data))  # type: ignore[misc]
        _write_json(folder, "config.json", exporter.config())
        if len(shards) > 1:
            index = {
                name: _shard_name(number, len(shards)) for number, shard in enumerate(shards, 1) for name, *_ in shard
            }
            _write_json(folder, INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index})
    return folder.destination


class _Exporter:
    """The tensors of the source's plain layout, made again from a pack, in order."""

    def __init__(self, reader: PackReader) -> None:
        self.reader = reader
        self.manifest = reader.manifest

    def config(self) -> dict[str, Any]:
        """The source's config without its quantisation, in BF16."""
        config = {key: copy.deepcopy(v) for key, v in self.manifest.config.items() if key not in _QUANTISATION_KEYS}
        for place in (config, config.get("text_config")):
            if isinstance(place, dict):
                for key in ("torch_dtype", "dtype"):
                    if key in place:
                        place[key] = "bfloat16"
        return config

    def tensors(self) -> Iterator[_Tensor]:
        """All of them; a weight that the source kept in one tensor with others is joined again."""
        joined: dict[str, list[tuple[str, DenseTensor]]] = {}
        for name, record in self.manifest.dense.items():
            if record.tied_to is not None:
                continue
            if record.source_columns is not None:
                joined.setdefault(record.parts[0][0], []).append((name, record))
            else:
                yield from self._dense_parts(name, record)
        for source, parts in joined.items():
            yield self._joined(source, parts)
        for name, table in self.manifest.tables.items():
            yield from self._table_parts(name, table)
        yield from self._experts()

    def _dense_parts(self, name: str, record: DenseTensor) -> Iterator[_Tensor]:
        first = 0
        integers = record.kind == "integers"
        for part, rows in record.parts:
            shape: tuple[int, ...] = (rows, *record.shape[1:]) if record.shape else ()
            if record.kind == "conv":
                shape = (rows, 1, *record.shape[1:])  # depthwise: one input channel a group

            def make(first: int = first, rows: int = rows, shape: tuple[int, ...] = shape) -> Iterator[torch.Tensor]:
                weight = plain_weight(self.reader.load_weight(name))
                yield (weight[first : first + rows] if record.shape else weight).reshape(shape)

            yield part, shape, "I64" if integers else "BF16", make
            first += rows

    def _joined(self, source: str, parts: list[tuple[str, DenseTensor]]) -> _Tensor:
        parts = sorted(parts, key=lambda part: part[1].source_columns or (0, 0))
        width = sum(record.shape[1] for _, record in parts)

        def make() -> Iterator[torch.Tensor]:
            yield torch.cat([plain_weight(self.reader.load_weight(name)) for name, _ in parts], 1)

        return source, (parts[0][1].shape[0], width), "BF16", make

    def _table_parts(self, name: str, table: TableRecord) -> Iterator[_Tensor]:
        first = 0
        at_once = max(1, (16 << 20) // (4 * table.columns))
        for part, rows in table.parts:

            def make(first: int = first, rows: int = rows) -> Iterator[torch.Tensor]:
                opened = self.reader.load_weight(name)
                assert isinstance(opened, TableFile)
                for start in range(first, first + rows, at_once):
                    yield opened.read_rows(start, min(at_once, first + rows - start))

            yield part, (rows, table.columns), "BF16", make
            first += rows

    def _experts(self) -> Iterator[_Tensor]:
        section, layout = self.manifest.experts, self.reader.layout
        if section is None or layout is None:
            return
        shapes = {
            "gate": (layout.intermediate, layout.hidden),
            "up": (layout.intermediate, layout.hidden),
            "down": (layout.hidden, layout.intermediate),
        }
        for layer, names in zip(section.layers, section.names, strict=True):
            for expert in range(section.num_experts):
                for place, projection in enumerate(("gate", "up", "down")):

                    def make(layer: int = layer, expert: int = expert, place: int = place) -> Iterator[torch.Tensor]:
                        yield self._expert_matrix(layer, expert, place)

                    name = str(getattr(names, projection)).replace("{expert}", str(expert))
                    yield name, shapes[projection], "BF16", make

    def _expert_matrix(self, layer: int, expert: int, place: int) -> torch.Tensor:
        assert self.reader.layout is not None
        blob, scales = self.reader.read_expert(layer, expert)
        matrix = self.reader.layout.unpack(blob.unsqueeze(0), scales.unsqueeze(0))[place]
        return dequantise(matrix)[0]


def plain_weight(weight: DenseWeight) -> torch.Tensor:
    """The tensor that a weight stands for: FP32, or int64 for integers."""
    if not isinstance(weight, Matrix):
        assert isinstance(weight, torch.Tensor)
        return weight
    if weight.format != "q8_0":
        return weight.data.float()
    ones = torch.ones(())
    return dequantise(QuantisedMatrix("q8_0", weight.data.shape[1], weight.data, weight.scales, ones))[
        :, : weight.columns
    ]


def _bytes_of(tensor: _Tensor) -> int:
    return math.prod(tensor[1]) * (8 if tensor[2] == "I64" else 2)


def _split_shards(tensors: list[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        nbytes = _bytes_of(tensor)
        if held and held + nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_shard(file: IO[bytes], tensors: list[_Tensor]) -> None:
    tensors = sorted(tensors, key=lambda tensor: tensor[2] != "I64")  # wide types first: all stay aligned
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        name, shape, dtype, _ = tensor
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + _bytes_of(tensor)]}
        end += _bytes_of(tensor)
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, _, dtype, make in tensors:
        for rows in make():
            stored = rows if dtype == "I64" else rows.to(torch.bfloat16)
            file.write(stored.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_json(folder: WholeFolder, name: str, value: object) -> None:
    data = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
    folder.write(name, lambda file: _put(file, data))


def _put(file: IO[bytes], data: bytes) -> None:
    file.write(data)
