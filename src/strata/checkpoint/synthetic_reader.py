"""A model with no file: every weight is computed from a seed and its name, straight to where it is wanted.

Lives in ``checkpoint`` as another reader of packs: it offers what ``PackReader`` does, and experts' places that hold
recipes instead of files, so no second copy of the model exists. Weights are whole numbers times powers of two, exact in
BF16, so that a checkpoint written from them is the same model. It must not know families: which weight writes to the
residual stream and which one picks is an argument. Decision record 0086.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from strata.checkpoint.dense_writer import DenseFormats, plan_dense
from strata.checkpoint.manifest import DenseTensor, ExpertNames, ExpertsSection, Manifest, TableRecord
from strata.checkpoint.pack_reader import BlobLocation, DenseWeight, PackReader
from strata.checkpoint.pack_writer import LAYOUT_NUMBER
from strata.checkpoint.synthetic_routing import Routing, num_topics, routing_numbers
from strata.checkpoint.table_rows import TableFile, row_bytes
from strata.checkpoint.weight_map import WeightEntry, WeightMap
from strata.checkpoint.weight_memory import TakeMemory, fresh_memory
from strata.errors import ConfigError
from strata.kernels.cpu.synthetic import RMS_OF_CODES, compute_blob, compute_rows, compute_values, key_of, recipe_of
from strata.kernels.ops import Matrix, MatrixFormat
from strata.quant.blocks import ExpertFormat
from strata.quant.layout import ExpertLayout
from strata.version import VERSION

__all__ = ["Scaling", "SyntheticReader", "SyntheticWeights"]

_SMALLEST_HALF = -14  # exponent of the smallest normal FP16 number
_STEP = -5  # embeddings and tables: whole numbers over 32, spread evenly to +-55, so that their size is one
_SIZE_ONE = 55
_LOUDER_HEAD = 2.0  # logits with a spread of two


@dataclass(frozen=True)
class SyntheticWeights:
    """What is computed. ``seed`` and ``routing`` are part of the model, the formats only of how it is stored."""

    seed: int = 1
    routing: Routing = "skewed"
    experts: ExpertFormat = "nvfp4"
    dense: MatrixFormat = "q8_0"
    hyper: MatrixFormat = "bf16"


@dataclass(frozen=True)
class Scaling:
    """What a family says of its weights: the size of what each computes, and which one picks routed experts."""

    gain: Callable[[str], float]
    is_router: Callable[[WeightEntry], bool]


class SyntheticReader(PackReader):
    """See the module's page. ``folder`` holds what is learned about the model (a profile) and its tokenizer, never its
    weights."""

    def __init__(
        self,
        folder: Path,
        raw: Mapping[str, Any],
        family: str,
        weight_map: WeightMap,
        top_k: int,
        scaling: Scaling,
        weights: SyntheticWeights = SyntheticWeights(),
        tokenizer_files: Sequence[str] = (),
    ) -> None:
        # Nothing of a pack is opened, so PackReader's constructor is not called; every method is replaced or needs
        # only what is set here.
        first = weight_map.experts[0]
        if first.hidden % 64 or first.intermediate % 64:
            sizes = f"{first.hidden} x {first.intermediate}"
            raise ConfigError(f"experts of {sizes} cannot be computed", "both widths must be multiples of 64")
        self.folder = folder
        self.weights = weights
        self._scaling, self._top_k = scaling, top_k
        self._hidden = first.hidden
        self._entries = {entry.name: entry for entry in weight_map.dense}
        self._files = {}
        self._tables = {}
        self.layout = ExpertLayout(first.hidden, first.intermediate, weights.experts)
        self.expert_layers = tuple(entry.layer for entry in weight_map.experts)
        self._positions = {layer: position for position, layer in enumerate(self.expert_layers)}
        count = (len(self.expert_layers), first.num_experts)
        self.tensor_scales = self._expert_scales().expand(*count, 3).contiguous()
        self.checksums = np.zeros(count, np.uint64)
        self.manifest = self._describe(raw, family, weight_map, tokenizer_files)

    @property
    def digest(self) -> str:
        """Of all that the weights are computed from."""
        table = [self.manifest.family, self.manifest.config, asdict(self.weights)]
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    @property
    def dense_bytes(self) -> int:
        return sum(self.matrix_bytes(name) for name in self.manifest.dense)

    @property
    def dense_file(self) -> None:
        return None

    @property
    def total_bytes(self) -> int:
        """Bytes that a pack of this model would have, but for its small files."""
        assert self.layout is not None
        tables = sum(table.rows * table.row_bytes for table in self.manifest.tables.values())
        return self.dense_bytes + tables + self.checksums.size * self.layout.blob_bytes

    def matrix_bytes(self, name: str) -> int:
        record = self.manifest.dense.get(name)
        if record is None or record.tied_to is not None:
            return 0
        if record.format == "q8_0":
            blocks = record.shape[0] * -(-record.shape[1] // 32)
            return 34 * blocks
        return math.prod(record.shape) * {"f32": 4, "bf16": 2, "i64": 8}[record.format]

    def _begin_dense(self) -> None:
        """No file is opened."""

    def load_weight(self, name: str, memory: TakeMemory = fresh_memory) -> DenseWeight:
        if name in self.manifest.tables:
            if name not in self._tables:
                table = self.manifest.tables[name]
                self._tables[name] = _ComputedTable(table.rows, table.columns, self._key(name))
            return self._tables[name]
        record = self.manifest.dense[name]
        entry = self._entries[record.tied_to or name]
        if record.kind == "vector":  # of norms, plain or plus one: near one both keep what a block reads at size one
            return 1 + compute_values(entry.shape, self._key(entry.name), 8, -6, torch.float32)
        if record.kind == "conv":
            return self._values(entry, torch.float32, memory)
        return self._matrix(entry, cast(MatrixFormat, record.format), memory)

    def expert_location(self, layer: int, expert: int) -> BlobLocation:
        assert self.layout is not None
        assert 0 <= expert < self.num_experts
        recipe = recipe_of(self.layout, self._key(f"experts.{layer}.{expert}"))
        return BlobLocation(self.folder / f"expert-{layer}-{expert}", 0, self.layout.blob_bytes, None, recipe)

    def read_expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        where = self.expert_location(layer, expert)
        assert where.recipe is not None
        return torch.from_numpy(compute_blob(where.recipe, where.nbytes)), self.tensor_scales[0, 0]

    def check(self, progress: Callable[[str, int, int], None] | None = None) -> int:
        """There is nothing that could be damaged."""
        return self.total_bytes

    # Computing ----------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> int:
        return key_of(self.weights.seed, name)

    def _matrix(self, entry: WeightEntry, format: MatrixFormat, memory: TakeMemory) -> Matrix:
        rows, columns = entry.shape
        if self._scaling.is_router(entry):
            return Matrix("f32", self._router(entry, memory), columns)
        if format != "q8_0" or columns % 32:
            dtype = torch.bfloat16 if format == "bf16" else torch.float32
            if entry.role == "embedding":
                return Matrix(format, self._embedding(entry, memory).to(dtype).mul_(2.0**_STEP), columns)
            return Matrix(format, self._values(entry, dtype, memory), columns)
        if entry.role == "embedding":
            codes, exponent = self._embedding(entry, memory), _STEP
        else:
            codes, exponent = self._values(entry, torch.int8, memory), self._size(entry)[1]
        scales = torch.from_numpy(memory(rows * (columns // 32) * 2)).view(torch.float16).view(rows, columns // 32)
        return Matrix("q8_0", codes, columns, scales.fill_(2.0**exponent))

    def _values(self, entry: WeightEntry, dtype: torch.dtype, memory: TakeMemory) -> torch.Tensor:
        return compute_values(entry.shape, self._key(entry.name), *self._size(entry), dtype, memory=memory)

    def _size(self, entry: WeightEntry) -> tuple[int, int]:
        """(amplitude, exponent) of evenly spread weights that keep the size of their input, times the gain."""
        gain = self._scaling.gain(entry.name) * (_LOUDER_HEAD if entry.role == "head" else 1.0)
        spread = math.sqrt(3 / entry.shape[-1]) * gain  # an even spread to +-a has the size a / sqrt(3)
        exponent = max(_SMALLEST_HALF, math.ceil(math.log2(spread / 127)))
        return max(1, min(127, round(spread / 2**exponent))), exponent

    def _widths(self) -> tuple[int, int]:
        """Where the constant part of an embedding ends, and where its topic's part does; the token's own follows."""
        return self._hidden // 8, self._hidden // 2

    def _signs(self) -> torch.Tensor:
        """+-1 [constant part]."""
        values = compute_values((self._widths()[0],), self._key("constant"), 127, 0, torch.int8)
        return torch.where(values < 0, -1, 1)

    def _embedding(self, entry: WeightEntry, memory: TakeMemory) -> torch.Tensor:
        """Codes int8 V x H over 2^-5: one constant, one of the token's topic, and one of its own; each of size one."""
        rows, columns = entry.shape
        constant, shared = self._widths()
        codes = compute_values((rows, columns), self._key(entry.name), _SIZE_ONE, 0, torch.int8, memory=memory)
        topics = compute_values((num_topics(rows), shared - constant), self._key("topics"), _SIZE_ONE, 0, torch.int8)
        codes[:, :constant] = (self._signs() * 32).to(torch.int8)
        for first in range(0, rows, len(topics)):
            here = codes[first : first + len(topics), constant:shared]
            here.copy_(topics[: len(here)])
        return codes

    def _router(self, entry: WeightEntry, memory: TakeMemory) -> torch.Tensor:
        """E x H, exact in BF16: biases against the constant part, noise against the other two."""
        count, columns = entry.shape
        constant, shared = self._widths()
        numbers = routing_numbers(self.weights.routing, count, self._top_k)
        order = compute_values((count, 4), self._key(entry.name + ".order"), 127, 0, torch.int8).to(torch.int64)
        mixed = ((order[:, 0] * 256 + order[:, 1]) * 256 + order[:, 2]) * 256 + order[:, 3]
        rank = torch.argsort(torch.argsort(mixed, stable=True), stable=True).numpy()
        bias, topic = torch.from_numpy(numbers.bias[rank]).float(), torch.from_numpy(numbers.topic[rank]).float()
        rows = compute_values((count, columns), self._key(entry.name), 127, 0, torch.float32, memory=memory)
        rows[:, constant:shared] *= ((3 * topic / (shared - constant)).sqrt() / 127)[:, None]
        rows[:, shared:] *= ((3 * (1 - topic) / (columns - shared)).sqrt() / 127)[:, None]
        torch.mul(self._signs().float(), (bias / constant)[:, None], out=rows[:, :constant])
        rounded = torch.from_numpy(memory(2 * rows.numel())).view(torch.bfloat16).view(rows.shape)
        return rows.copy_(rounded.copy_(rows))

    def _expert_scales(self) -> torch.Tensor:
        """FP32 [3], powers of two. Formats without tensor scales have ones."""
        assert self.layout is not None
        if self.layout.format != "nvfp4":
            return torch.ones(3)
        size, down = RMS_OF_CODES["nvfp4"], self._scaling.gain("experts.down")
        wanted = [1 / math.sqrt(self.layout.hidden)] * 2 + [down / math.sqrt(self.layout.intermediate)]
        return torch.tensor([2.0 ** round(math.log2(one / size)) for one in wanted])

    # Describing ---------------------------------------------------------------------------------------------------

    def _describe(
        self, raw: Mapping[str, Any], family: str, weight_map: WeightMap, tokenizer_files: Sequence[str]
    ) -> Manifest:
        formats = plan_dense(weight_map.dense, DenseFormats(self.weights.dense, self.weights.hyper)).formats
        dense, tables = {}, {}
        for entry in weight_map.dense:
            if entry.kind == "table":
                tables[entry.name] = _describe_table(entry)
                continue
            format = formats[entry.name]
            if format == "q8_0" and entry.shape[1] % 32:
                format = "bf16"
            dense[entry.name] = DenseTensor(
                kind=cast(Literal["matrix", "vector", "conv"], entry.kind),
                format=format,
                shape=list(entry.shape),
                checksums={},
                parts=_parts(entry),
                tied_to=entry.tied_to,
            )
        return Manifest(
            format="strata-pack",
            version=1,
            needs=VERSION,
            written_by=f"strata {VERSION}",
            family=family,
            source_name=self.folder.name,
            config=dict(raw),
            absent_groups=[],
            dense=dense,
            tables=tables,
            experts=self._describe_experts(weight_map),
            tokenizer_files=list(tokenizer_files),
            files={},
        )

    def _describe_experts(self, weight_map: WeightMap) -> ExpertsSection:
        assert self.layout is not None
        names = []
        for entry in weight_map.experts:
            source = next(one for one in entry.sources if one.gate and one.up and not one.packed)
            names.append(ExpertNames(gate=str(source.gate), up=str(source.up), down=source.down))
        return ExpertsSection(
            format=self.layout.format,
            layout=LAYOUT_NUMBER,
            hidden=self.layout.hidden,
            intermediate=self.layout.intermediate,
            num_experts=weight_map.experts[0].num_experts,
            blob_bytes=self.layout.blob_bytes,
            blobs_per_file=1,
            layers=list(self.expert_layers),
            names=names,
            files=[],
        )


def _parts(entry: WeightEntry) -> list[tuple[str, int]]:
    """The first alternative's names; a tied weight has none."""
    if entry.tied_to:
        return []
    names, rows = entry.sources[0], entry.shape[0]
    return [(part, rows * (at + 1) // len(names) - rows * at // len(names)) for at, part in enumerate(names)]


def _describe_table(entry: WeightEntry) -> TableRecord:
    rows, columns = entry.shape
    nbytes = row_bytes(columns, "q8_0")
    return TableRecord(
        file="computed", format="q8_0", rows=rows, columns=columns, row_bytes=nbytes, parts=_parts(entry)
    )


class _ComputedTable(TableFile):
    """Rows of a table in memory that is read like a file: it has no name, and is gone when it is closed."""

    def __init__(self, rows: int, columns: int, key: int) -> None:
        self.path = Path("computed-table")
        self.rows, self.columns, self.format = rows, columns, "q8_0"
        self.row_bytes = row_bytes(columns, "q8_0")
        self._file = _nameless_file()
        os.ftruncate(self._file, rows * self.row_bytes)
        # Computed where it stays: writing it from elsewhere is one thread's work.
        with os.fdopen(os.dup(self._file), "r+b") as file:
            mapped = np.memmap(file, np.uint8, "r+", shape=(rows, self.row_bytes))
            compute_rows(mapped, 0, columns, key, _SIZE_ONE, _STEP)


def _nameless_file() -> int:
    """A descriptor of memory where the system has such, else of a temporary file that is already removed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("computed-table")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
