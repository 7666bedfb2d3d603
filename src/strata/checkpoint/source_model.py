"""A checkpoint seen through a family's weight map: every weight found once, every tensor accounted for.

Lives in ``checkpoint`` between the reader (names and bytes) and the pack writer (formats). All of the
accounting happens at opening, from headers alone: missing, doubled, partial, and unknown tensors, sizes that
contradict the config, tied heads that are present. Nothing is read before it all fits. It must not know any family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from strata.checkpoint.safetensors_reader import Checkpoint, list_names
from strata.checkpoint.stored_weight import KNOWN_SUFFIXES, StoredWeight, decode, find_stored
from strata.checkpoint.weight_map import ExpertEntry, ExpertSource, WeightEntry, WeightMap
from strata.errors import CheckpointError
from strata.quant.blocks import QuantisedMatrix

CACHE_SCALES = (".k_scale", ".v_scale")  # of a quantised key/value cache, beside no weight: our cache is not quantised

__all__ = ["ExpertWeights", "SourceModel", "WeightSource"]

Projection = torch.Tensor | QuantisedMatrix

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One routed expert: gate and up I x H, down H x I; each a plain tensor (BF16, F16, F32) or packed NVFP4."""

    gate: Projection
    up: Projection
    down: Projection


class WeightSource(Protocol):
    """What the pack writer asks of weights, be they of a checkpoint or random. See ``SourceModel`` for the methods."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def entries(self) -> tuple[WeightEntry, ...]: ...
    @property
    def expert_entries(self) -> tuple[ExpertEntry, ...]: ...
    @property
    def absent_groups(self) -> frozenset[str]: ...
    @property
    def tokenizer_files(self) -> tuple[Path, ...]: ...
    def parts(self, name: str) -> list[tuple[str, int]]: ...
    def expert_names(self, layer: int) -> tuple[str, str, str]: ...
    def source_dtype(self, name: str) -> str: ...
    def read_rows(self, name: str, rows_at_once: int) -> Iterator[torch.Tensor]: ...
    def has_row_scales(self, name: str) -> bool: ...
    def read_fp8_rows(self, name: str, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...
    def read_expert(self, layer: int, expert: int) -> ExpertWeights: ...


@dataclass(frozen=True)
class _FoundExperts:
    """Where a layer's experts lie. Per-expert storage has a weight an expert and projection, packed has one."""

    source: ExpertSource
    gate: tuple[StoredWeight, ...]  # holds gate_up when the source is fused
    up: tuple[StoredWeight, ...]
    down: tuple[StoredWeight, ...]


class SourceModel:
    """The weights of ``checkpoint`` by the canonical names of ``weight_map``. Borrows the checkpoint.

    ``entries`` and ``expert_entries`` are those present (an optional group may be absent as a whole, its
    name is then in ``absent_groups``). Raises ``CheckpointError`` naming the tensors when anything is amiss.
    """

    def __init__(self, checkpoint: Checkpoint, weight_map: WeightMap) -> None:
        self.checkpoint = checkpoint
        self.weight_map = weight_map
        self._found: dict[str, tuple[StoredWeight, ...]] = {}
        self._experts: dict[int, _FoundExperts] = {}
        self._missing: dict[str, list[str]] = {}  # group or "" -> source names
        self._present: set[str] = set()
        for entry in weight_map.dense:
            self._find_dense(entry)
        for experts in weight_map.experts:
            self._find_experts(experts)
        self.absent_groups = self._check_groups()
        self.name = checkpoint.folder.name
        self.config = checkpoint.config
        self.entries = tuple(entry for entry in weight_map.dense if entry.group not in self.absent_groups)
        self.expert_entries = tuple(entry for entry in weight_map.experts if entry.group not in self.absent_groups)
        self._check_every_tensor_is_used()
        for entry in self.entries:
            self._check_dense_shape(entry)
        for experts in self.expert_entries:
            self._check_expert_shapes(experts)

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files beside the weights that a tokenizer or a chat template is made of, and the generation defaults."""
        return tuple(path for name in TOKENIZER_FILES if (path := self.checkpoint.folder / name).is_file())

    def parts(self, name: str) -> list[tuple[str, int]]:
        """Source tensor names of a dense weight (always as of a plain checkpoint) with the rows of each."""
        return [(stored.name, stored.shape[0] if stored.shape else 1) for stored in self._found.get(name, ())]

    def expert_names(self, layer: int) -> tuple[str, str, str]:
        """Plain per-expert names (with ``{expert}``) of gate, up, and down: the map's first alternative of the kind
        under the prefix that this checkpoint uses."""
        source = self._experts[layer].source
        per_expert = [one for one in self._expert_entry(layer).sources if one.gate and one.up and not one.packed]
        same = [one for one in per_expert if _common(one.down, source.down) >= source.down.rfind("experts.")]
        best = (same or per_expert)[0]
        assert best.gate is not None
        assert best.up is not None
        return best.gate, best.up, best.down

    def source_dtype(self, name: str) -> str:
        """The type in which a dense weight is stored: BF16, F16, F32, F8_E4M3, NVFP4, I64, I32."""
        return self._found[name][0].dtype

    def read_dense(self, name: str) -> torch.Tensor:
        """A dense weight in its canonical shape: BF16, F16, F32, int64, or FP32 where it was decoded.

        ``KeyError`` for a tied one, which has no data of its own.
        """
        entry = self.weight_map.entry(name)
        rows = max(1, max(stored.shape[0] if stored.shape else 1 for stored in self._found[name]))
        parts = list(self.read_rows(name, rows))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(entry.shape)

    def read_rows(self, name: str, rows_at_once: int) -> Iterator[torch.Tensor]:
        """The rows (axis 0) of a dense weight in order, at most so many at a time, in their canonical shape."""
        entry = self.weight_map.entry(name)
        for stored in self._found[name]:
            for start in range(0, stored.shape[0] if stored.shape else 1, rows_at_once):
                stop = min(start + rows_at_once, stored.shape[0]) if stored.shape else None
                rows = decode(stored.read(self.checkpoint, start, stop))
                if entry.columns is not None:
                    rows = rows[:, entry.columns[0] : entry.columns[1]].contiguous()
                if entry.kind == "integers":
                    rows = rows.to(torch.int64)
                yield rows.reshape(rows.shape[:1] + entry.shape[1:]) if entry.shape else rows.reshape(())

    def read_fp8_rows(self, name: str, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The FP8 codes of a dense weight and the FP32 scale of each row. Only where ``has_row_scales``."""
        for stored in self._found[name]:
            for start in range(0, stored.shape[0], rows_at_once):
                yield stored.read_fp8_rows(self.checkpoint, start, min(start + rows_at_once, stored.shape[0]))

    def has_row_scales(self, name: str) -> bool:
        """Whether a dense weight is FP8 with one scale for all or one a row (not one a block)."""
        return all(stored.form == "fp8" and not stored.block_scaled for stored in self._found[name])

    def read_expert(self, layer: int, expert: int) -> ExpertWeights:
        """One expert; a fused or packed one is cut out without reading its neighbours."""
        found, entry = self._experts[layer], self._expert_entry(layer)
        down = self._read_projection(found.down, expert, found.source)
        gate = self._read_projection(found.gate, expert, found.source)
        if found.up:
            return ExpertWeights(gate, self._read_projection(found.up, expert, found.source), down)
        width = entry.intermediate
        return ExpertWeights(_rows(gate, 0, width), _rows(gate, width, 2 * width), down)

    def experts_are_nvfp4(self, layer: int) -> bool:
        """Whether the layer's experts are stored packed, so that they can be repacked without loss."""
        return all(stored.form == "nvfp4" for stored in self._experts[layer].down)

    def _read_projection(self, stored: tuple[StoredWeight, ...], expert: int, source: ExpertSource) -> Projection:
        weight = stored[0] if source.packed else stored[expert]
        start, stop = (expert, expert + 1) if source.packed else (0, None)
        data = weight.read(self.checkpoint, start, stop)
        if isinstance(data, QuantisedMatrix):
            return _first(data) if source.packed else data
        matrix = data[0] if source.packed else data
        return matrix if source.orientation == "output_first" else matrix.t().contiguous()

    def _expert_entry(self, layer: int) -> ExpertEntry:
        return next(entry for entry in self.weight_map.experts if entry.layer == layer)

    def _find_dense(self, entry: WeightEntry) -> None:
        whole: list[tuple[StoredWeight, ...]] = []
        absent: list[list[str]] = []
        for names in entry.sources:
            found = [(name, find_stored(self.checkpoint, name)) for name in names]
            missing = [name for name, stored in found if stored is None]
            if missing:
                absent.append(missing)
            else:
                whole.append(tuple(stored for _, stored in found if stored))
            if len(missing) < len(names):
                self._present.add(entry.group or "")
        where = self.checkpoint.folder
        if entry.tied_to is not None:
            if whole:
                raise CheckpointError(
                    f"{where}: the config ties {entry.name!r} to {entry.tied_to!r}, yet the checkpoint holds "
                    f"{whole[0][0].name}",
                    "set tie_word_embeddings to false in config.json if its own tensor is meant",
                )
            return
        if len(whole) > 1:
            both = list_names(stored.name for alternative in whole for stored in alternative)
            raise CheckpointError(f"{where}: {entry.name!r} is stored in two ways: {both}")
        if whole:
            self._found[entry.name] = whole[0]
        else:
            fewest = min(absent, key=len)
            self._missing.setdefault(entry.group or "", []).extend(fewest)

    def _find_experts(self, entry: ExpertEntry) -> None:
        """Parts of an alternative that was not chosen are caught later, as tensors that nothing uses."""
        complete: list[_FoundExperts] = []
        incomplete: list[list[str]] = []
        for source in entry.sources:
            found, absent = self._find_expert_source(entry, source)
            if absent:
                incomplete.append(absent)
            else:
                complete.append(found)
            if found.gate or found.up or found.down:
                self._present.add(entry.group or "")
        if len(complete) > 1:
            both = list_names(found.down[0].name for found in complete)
            raise CheckpointError(
                f"{self.checkpoint.folder}: experts of layer {entry.layer} are stored in two ways: {both}"
            )
        if complete:
            self._experts[entry.layer] = complete[0]
        else:
            fewest = min(incomplete, key=len)
            self._missing.setdefault(entry.group or "", []).extend(fewest)

    def _find_expert_source(self, entry: ExpertEntry, source: ExpertSource) -> tuple[_FoundExperts, list[str]]:
        numbers: Sequence[int] = (0,) if source.packed else range(entry.num_experts)
        absent: list[str] = []

        def find(pattern: str | None) -> tuple[StoredWeight, ...]:
            found = []
            for number in numbers if pattern else ():
                assert pattern is not None
                name = pattern.replace("{expert}", str(number))
                stored = find_stored(self.checkpoint, name)
                if stored is None:
                    absent.append(name)
                else:
                    found.append(stored)
            return tuple(found)

        return _FoundExperts(source, find(source.gate or source.gate_up), find(source.up), find(source.down)), absent

    def _check_groups(self) -> frozenset[str]:
        """Groups that are absent as a whole; anything else that is missing is an error listing the names."""
        absent = {group for group in self._missing if group and group not in self._present}
        missing = [name for group, names in self._missing.items() if group not in absent for name in names]
        if missing:
            untied = {name for entry in self.weight_map.dense if entry.role == "head" for name in entry.sources[0]}
            hint = "fetch the checkpoint again"
            if untied & set(missing):
                hint = "the config says that the head is not tied to the embedding (tie_word_embeddings)"
            raise CheckpointError(
                f"{self.checkpoint.folder}: {len(missing)} weights are missing: {list_names(missing)}", hint
            )
        return frozenset(absent)

    def _check_every_tensor_is_used(self) -> None:
        used: dict[str, list[WeightEntry | ExpertEntry]] = {}
        for entry in self.entries:
            for stored in self._found.get(entry.name, ()):
                for name in stored.names:
                    used.setdefault(name, []).append(entry)
        for experts in self.expert_entries:
            found = self._experts[experts.layer]
            for stored in (*found.gate, *found.up, *found.down):
                for name in stored.names:
                    used.setdefault(name, []).append(experts)
        for name, owners in used.items():
            if len(owners) > 1 and not self._is_split_by_columns(name, owners):
                raise CheckpointError(f"{self.checkpoint.folder}: tensor {name!r} serves two weights of the map")
        ignored = self.weight_map.ignored
        unknown = [
            name
            for name in self.checkpoint.specs
            if name not in used and not name.startswith(ignored) and not name.endswith(CACHE_SCALES)
        ]
        if unknown:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {len(unknown)} tensors are unknown: {list_names(unknown)}",
                f"suffixes that are read: {', '.join(KNOWN_SUFFIXES)}",
            )

    def _is_split_by_columns(self, name: str, owners: Sequence[WeightEntry | ExpertEntry]) -> bool:
        ranges = sorted(owner.columns for owner in owners if isinstance(owner, WeightEntry) and owner.columns)
        width = self.checkpoint.specs[name].shape[-1]
        return len(ranges) == len(owners) and [0, *(stop for _, stop in ranges)] == [
            *(start for start, _ in ranges),
            width,
        ]

    def _check_dense_shape(self, entry: WeightEntry) -> None:
        if entry.name not in self._found:
            return
        found = self._found[entry.name]
        shapes = [_squeeze(stored.shape, len(entry.shape)) for stored in found]
        rows = sum(shape[0] for shape in shapes) if entry.shape else 1
        columns = entry.shape[1:]
        if entry.columns is not None:
            in_range = all(shape[1] >= entry.columns[1] for shape in shapes if len(shape) == 2)
            columns = shapes[0][1:] if in_range and entry.columns[1] - entry.columns[0] == entry.shape[1] else columns
        if any(shape[1:] != columns for shape in shapes) or (entry.shape and rows != entry.shape[0]):
            stored_shapes = ", ".join(str(list(stored.shape)) for stored in found[:4])
            raise CheckpointError(
                f"{self.checkpoint.folder}: {found[0].name} has shape {stored_shapes}, "
                f"the config needs {list(entry.shape)}"
            )
        integers = entry.kind == "integers"
        for stored in found:
            if integers != stored.dtype.startswith("I"):
                raise CheckpointError(f"{self.checkpoint.folder}: {stored.name} is of type {stored.dtype}")

    def _check_expert_shapes(self, entry: ExpertEntry) -> None:
        found = self._experts[entry.layer]
        source = found.source
        gate_rows = entry.intermediate * (1 if source.gate else 2)
        self._check_expert_shape(entry, source, found.gate, gate_rows, entry.hidden)
        self._check_expert_shape(entry, source, found.up, entry.intermediate, entry.hidden)
        self._check_expert_shape(entry, source, found.down, entry.hidden, entry.intermediate)
        forms = {stored.form for stored in (*found.gate, *found.up, *found.down)}
        where = f"{self.checkpoint.folder}: experts of layer {entry.layer}"
        if "fp8" in forms:
            raise CheckpointError(
                f"{where} are stored in FP8, which is not read", "use the BF16 or an NVFP4 checkpoint"
            )
        if len(forms) > 1:
            raise CheckpointError(f"{where} are partly packed in 4 bits and partly not ({found.down[0].name})")

    def _check_expert_shape(
        self, entry: ExpertEntry, source: ExpertSource, stored: tuple[StoredWeight, ...], rows: int, columns: int
    ) -> None:
        expected: tuple[int, ...] = (rows, columns) if source.orientation == "output_first" else (columns, rows)
        if source.packed:
            expected = (entry.num_experts, *expected)
        for weight in stored:
            if weight.form == "nvfp4" and source.orientation == "input_first":
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {weight.name} is NVFP4 with inputs first, which is not read"
                )
            if weight.shape != expected:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {weight.name} has shape {list(weight.shape)}, "
                    f"the config needs {list(expected)} ({source.orientation.replace('_', ' ')})"
                )


def _squeeze(shape: tuple[int, ...], dimensions: int) -> tuple[int, ...]:
    """Drops axes of size one, from the second on, until so many dimensions are left."""
    result = list(shape)
    while len(result) > dimensions and 1 in result[1:]:
        result.pop(result.index(1, 1))
    return tuple(result)


def _first(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """The first of the matrices along the leading axis."""
    assert matrix.scales is not None
    return QuantisedMatrix(matrix.format, matrix.columns, matrix.codes[0], matrix.scales[0], matrix.tensor_scale[0])


def _rows(matrix: Projection, start: int, stop: int) -> Projection:
    """A view of some rows; packed ones keep the tensor scale of the whole."""
    if isinstance(matrix, torch.Tensor):
        return matrix[start:stop]
    assert matrix.scales is not None
    return QuantisedMatrix(
        matrix.format, matrix.columns, matrix.codes[start:stop], matrix.scales[start:stop], matrix.tensor_scale
    )


def _common(first: str, second: str) -> int:
    """Length of the common beginning of two names."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
