"""What a plan is about: a pack, a checkpoint folder, a bare config.json, a known shape; no weight is read.

Lives in ``engine`` beside ``models.py``, which opens the same names to run them. A checkpoint is described as the pack
that loading would make of it. It allocates nothing and must not know the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strata.checkpoint.dense_writer import DenseFormats, plan_dense
from strata.checkpoint.pack_reader import BlobLocation, PackReader
from strata.checkpoint.recognise import Kind, naming_config, recognise
from strata.engine.locate import BUILT_IN_NAME, SMALL_NAME, shipped_pack
from strata.engine.shape import config_shape, reader_shape
from strata.errors import CheckpointError
from strata.files import read_regular
from strata.models import find
from strata.models.known_shapes import BUILT_IN_SHAPE, KNOWN_SHAPES
from strata.paths import expanded, find_home
from strata.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from strata.kvcache.attention_cache import KvFormat
    from strata.memory.requests import ModelShape
    from strata.models.family import Family, FamilyConfig
    from strata.quant.blocks import ExpertFormat

__all__ = ["NUM_SAMPLES", "DenseMatrix", "PlanSubject", "find_subject"]

NUM_SAMPLES = 192  # experts to measure reads with, 0.5 GB of a real model's: many times what a last cache holds
Source = Literal["pack", "checkpoint folder", "config.json", "known shape", "built-in model"]


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix that every token is multiplied with: ``rows`` outputs of ``columns`` inputs."""

    rows: int
    columns: int
    format: str


@dataclass(frozen=True)
class PlanSubject:
    """``source`` says what the numbers come from; all but 'pack' are those of a pack in default formats.

    ``expert_sample``: where some of its experts lie, spread over all of them; empty where there is no pack.
    """

    name: str
    source: Source
    config: FamilyConfig
    shape: ModelShape
    layout: ExpertLayout
    matrices: tuple[DenseMatrix, ...]
    expert_sample: tuple[BlobLocation, ...] = ()

    @property
    def expert_format(self) -> ExpertFormat:
        return self.layout.format


def find_subject(name: str | None, kv: KvFormat) -> PlanSubject:
    """What ``name`` says: a path, a built-in name, a name in STRATA_HOME, a known shape, in this order.

    Raises ``CheckpointError`` in one line for what is not read.
    """
    if name is None or name == SMALL_NAME:
        shipped = shipped_pack()
        if shipped is not None:
            return _of_pack(shipped, kv, "built-in model")
        return _of_config(BUILT_IN_NAME, "built-in model", BUILT_IN_SHAPE, kv)
    path = expanded(name)
    if not path.exists():
        if name == BUILT_IN_NAME:
            return _of_config(name, "built-in model", BUILT_IN_SHAPE, kv)
        kept = find_home().models / name
        if not kept.exists():
            if name in KNOWN_SHAPES:
                return _of_config(name, "known shape", KNOWN_SHAPES[name], kv)
            raise CheckpointError(
                f"no model '{name}' to plan: no such path, no model and no known shape of that name",
                f"give a pack, a checkpoint folder, a config.json, or one of {', '.join(KNOWN_SHAPES)}",
            )
        path = kept
    if path.is_file() and path.suffix == ".json":
        with naming_config(path.parent):
            return _of_config(path.resolve().parent.name, "config.json", _read_config(path), kv)
    found = recognise(path)
    if found.kind is Kind.PACK:
        return _of_pack(path, kv, "pack")
    if found.kind is Kind.SAFETENSORS or (path / "config.json").is_file():
        with naming_config(path):
            return _of_config(path.resolve().name, "checkpoint folder", _read_config(path / "config.json"), kv)
    raise found.refuse()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a model's config.json: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, a model's config.json is an object")
    return raw


def _of_config(name: str, source: Source, raw: Mapping[str, Any], kv: KvFormat) -> PlanSubject:
    family = find(raw)
    config = family.read_config(raw)
    layout = ExpertLayout(config.hidden, config.expert_intermediate, "nvfp4")
    entries = [entry for entry in family.weight_map(config).dense if entry.group is None]
    formats = plan_dense(entries, DenseFormats()).formats
    return PlanSubject(
        name, source, config, config_shape(name, raw, kv), layout, _matrices(family, config, dict(formats))
    )


def _of_pack(path: Path, kv: KvFormat, source: Source) -> PlanSubject:
    with PackReader(path, find) as reader:
        if reader.layout is None:
            raise CheckpointError(f"{reader.folder} has no routed experts", "models with routed experts are planned")
        family = find(reader.config)
        config = family.read_config(reader.config)
        formats = {name: record.format for name, record in reader.manifest.dense.items() if record.kind == "matrix"}
        name = reader.folder.resolve().name
        shape = reader_shape(name, config, reader, kv)
        sample = _sample_experts(reader)
        return PlanSubject(name, source, config, shape, reader.layout, _matrices(family, config, formats), sample)


def _sample_experts(reader: PackReader) -> tuple[BlobLocation, ...]:
    total = len(reader.expert_layers) * reader.num_experts
    numbers = [index * total // NUM_SAMPLES for index in range(NUM_SAMPLES)] if total > NUM_SAMPLES else range(total)
    places = (divmod(number, reader.num_experts) for number in numbers)
    return tuple(reader.expert_location(reader.expert_layers[layer], expert) for layer, expert in places)


def _matrices(family: Family, config: FamilyConfig, formats: Mapping[str, str]) -> tuple[DenseMatrix, ...]:
    """All but the embedding, of which a token reads one row, and the draft block, which plain decode leaves out."""
    return tuple(
        DenseMatrix(entry.shape[0], entry.shape[1], formats[entry.name])
        for entry in family.weight_map(config).dense
        if entry.kind == "matrix" and entry.role != "embedding" and entry.group is None
    )
