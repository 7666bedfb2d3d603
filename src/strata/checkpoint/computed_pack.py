"""Writes the pack of a model whose weights are computed, so that loading from a drive can be measured at any size.

Lives in ``checkpoint`` between ``synthetic_reader`` and the pack writer: experts are written as they are computed, blob
by blob; dense weights and tables go through the writer's own formats. It must not know families.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from strata.checkpoint.export import plain_weight
from strata.checkpoint.pack_writer import PackOptions, Progress, write_pack
from strata.checkpoint.source_model import ExpertWeights
from strata.checkpoint.synthetic_reader import SyntheticReader
from strata.checkpoint.table_rows import TableFile
from strata.checkpoint.weight_map import WeightMap

__all__ = ["write_computed_pack"]


class _ComputedSource:
    """A ``WeightSource`` over a computed model, which lacks optional groups of ``weight_map``; its experts are taken as
    blobs."""

    def __init__(self, reader: SyntheticReader, weight_map: WeightMap) -> None:
        self._reader = reader
        self.name = reader.manifest.source_name
        self.config: dict[str, Any] = reader.manifest.config
        here = {*reader.manifest.dense, *reader.manifest.tables}
        self.entries = tuple(entry for entry in weight_map.dense if entry.name in here)
        self.expert_entries = tuple(entry for entry in weight_map.experts if entry.layer in reader.expert_layers)
        absent = {entry.group for entry in weight_map.dense if entry.name not in here}
        self.absent_groups = frozenset(group for group in absent if group is not None)
        assert len(self.absent_groups) == len(absent), "what is not computed is optional"
        self.tokenizer_files = tuple(reader.folder / name for name in reader.manifest.tokenizer_files)

    def parts(self, name: str) -> list[tuple[str, int]]:
        manifest = self._reader.manifest
        return manifest.tables[name].parts if name in manifest.tables else manifest.dense[name].parts

    def expert_names(self, layer: int) -> tuple[str, str, str]:
        section = self._reader.manifest.experts
        assert section is not None, "a computed model has routed experts"
        names = section.names[section.layers.index(layer)]
        return names.gate, names.up, names.down

    def source_dtype(self, name: str) -> str:
        return "F32"

    def read_rows(self, name: str, rows_at_once: int) -> Iterator[torch.Tensor]:
        weight = self._reader.load_weight(name)
        if isinstance(weight, TableFile):
            for first in range(0, weight.rows, rows_at_once):
                yield weight.read_rows(first, min(rows_at_once, weight.rows - first))
            return
        values = plain_weight(weight)
        for first in range(0, len(values) if values.ndim else 1, rows_at_once):
            yield values[first : first + rows_at_once] if values.ndim else values

    def has_row_scales(self, name: str) -> bool:
        """Never: nothing is FP8 here."""
        return False

    def read_fp8_rows(self, name: str, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Not called, as ``has_row_scales`` says."""
        raise AssertionError(name)

    def read_expert(self, layer: int, expert: int) -> ExpertWeights:
        """Not called: blobs are written as they are computed."""
        raise AssertionError((layer, expert))


def write_computed_pack(
    reader: SyntheticReader, weight_map: WeightMap, destination: str | Path, progress: Progress | None = None
) -> Path:
    """The pack of ``reader``'s model, ``weight_map`` being all that its family knows; returns its folder. Experts are
    the reader's own bytes, dense weights and tables are stored in its formats. Raises ``CheckpointError``."""
    weights = reader.weights
    options = PackOptions(experts=weights.experts, dense=weights.dense, hyper=weights.hyper)
    source = _ComputedSource(reader, weight_map)
    return write_pack(source, destination, reader.manifest.family, options, progress, blobs=reader.read_expert)
