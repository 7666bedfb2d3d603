"""A model's sizes for the planner: from an open pack, or from a configuration alone when nothing was downloaded.

Lives in ``engine`` because it joins a family's configuration, the pack's formats and the planner's plain numbers.
It must not allocate or read weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strata.checkpoint.dense_writer import DenseFormats, plan_dense
from strata.kernels.cuda.mailbox import mailbox_bytes
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.prompt.frame import FRAME_ROWS
from strata.memory.requests import ModelShape
from strata.models import find
from strata.quant.layout import ExpertLayout

if TYPE_CHECKING:
    from strata.checkpoint.pack_reader import PackReader
    from strata.engine.models import OpenModel
    from strata.kvcache.attention_cache import KvFormat
    from strata.models.family import FamilyConfig

__all__ = ["config_shape", "model_shape", "reader_shape"]

AT_ONCE = 64 << 20  # of weights that are being dequantised for a prompt, in between; a layer's stay as BF16
LIBRARY_BYTES = 32 << 20  # workspace of the library's products, for each pass: it has a thread of its own
SPAN = 4096  # positions over which the growth of a round's buffers is taken


def model_shape(model: OpenModel, kv: KvFormat) -> ModelShape:
    """Sizes of an open model, as its pack stores it."""
    return reader_shape(model.name, model.config, model.reader, kv)


def reader_shape(name: str, config: FamilyConfig, reader: PackReader, kv: KvFormat) -> ModelShape:
    """Sizes of an open pack with routed experts."""
    assert reader.layout is not None, "the model has routed experts"
    layers = len(reader.expert_layers)  # a draft block's experts are experts of the pack like any others
    drafts = sum(layer >= config.num_layers for layer in reader.expert_layers)
    shape = _shape(name, config, kv, layers, reader.layout.blob_bytes, reader.dense_bytes)
    return dataclasses.replace(shape, draft_layers=drafts)


def config_shape(name: str, raw: Mapping[str, Any], kv: KvFormat) -> ModelShape:
    """Sizes that a pack of default formats would have (NVFP4 experts, 8-bit matrices), from config.json alone."""
    family = find(raw)
    config = family.read_config(raw)
    entries = [entry for entry in family.weight_map(config).dense if entry.group is None]
    dense = plan_dense(entries, DenseFormats("q8_0", "bf16"))
    layout = ExpertLayout(config.hidden, config.expert_intermediate, "nvfp4")
    return _shape(name, config, kv, config.num_layers, layout.blob_bytes, dense.nbytes - len(dense.header))


def _shape(
    name: str, config: FamilyConfig, kv: KvFormat, num_layers: int, blob_bytes: int, dense_bytes: int
) -> ModelShape:
    # What attention needs stops growing where a sparse index has its fill: the line at the longest context is above it.
    whole = config.round_bytes(config.max_positions, MAX_WINDOW)
    span = min(config.max_positions, SPAN)
    per_token = -(-(whole - config.round_bytes(config.max_positions - span, MAX_WINDOW)) // span)
    frame = config.frame_bytes(config.max_positions, FRAME_ROWS)
    frame_per_token = -(-(frame - config.frame_bytes(config.max_positions - span, FRAME_ROWS)) // span)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        blob_bytes=blob_bytes,
        hidden=config.hidden,
        dense_bytes=dense_bytes,
        state_bytes=config.state_bytes(0, kv),
        kv_bytes_per_token=config.position_bytes(kv),
        round_bytes=max(1, whole - per_token * config.max_positions),
        round_bytes_per_token=per_token,
        chunk_bytes_per_row=config.chunk_bytes() + LIBRARY_BYTES // FRAME_ROWS,
        row_flop=2 * (dense_bytes + 3 * num_layers * config.top_k * config.hidden * config.expert_intermediate),
        frame_bytes=max(1, frame - frame_per_token * config.max_positions) + 2 * dense_bytes // num_layers + AT_ONCE,
        frame_bytes_per_token=frame_per_token,
        mailbox_bytes=mailbox_bytes(config.hidden, config.top_k, config.vocabulary) + config.gathered_bytes(MAX_WINDOW),
    )
