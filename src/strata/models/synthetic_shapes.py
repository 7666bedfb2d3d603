"""Shapes that a synthetic model may have, and how its weights are scaled so that what a router reads lasts.

Lives in ``models`` because it knows weight names: which matrices write to the residual streams, which open a mixer's
gates, which is the router of routed experts. The weights themselves are computed in ``checkpoint``. Decision record
0086 has the reasons. It must not import torch.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from strata.checkpoint.weight_map import WeightEntry, WeightMap
from strata.errors import ConfigError
from strata.models import find
from strata.models.known_shapes import KNOWN_SHAPES, PROBE_SHAPES

__all__ = ["SYNTHETIC_SHAPES", "gain_of", "is_router", "synthetic_config", "synthetic_map"]

# 16 primes from here on add up to 3.2 million rows, the released table has 320 million.
TABLE_BASE = 200_000

# For rehearsals: every part of the two families in the small.
_TINY: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 262144,
}
_TINY_HYPER: dict[str, Any] = {
    "ple_layer_ids": [2],
    "ple_embed_dim": 256,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 1000,
    "indexer_budget": 256,
    "indexer_head_dim": 32,
}

# For `strata verify`: matrices as wide as a released model's, and little else, so that a prompt takes a second.
_WIDE: dict[str, Any] = {
    "hidden_size": 2560,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "indexer_head_dim": 64,
    "hc_lowrank": 64,
    "ple_layer_ids": [1],
    "ple_embed_dim": 640,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 288,
    "max_position_embeddings": 4096,
}

SYNTHETIC_SHAPES: dict[str, dict[str, Any]] = {
    **KNOWN_SHAPES,
    "tiny-attention": {**PROBE_SHAPES["qwen3_moe"], **_TINY, "eos_token_id": [0]},
    "tiny-hyper": {**PROBE_SHAPES["qwen4_exp"], **_TINY, **_TINY_HYPER, "eos_token_id": [0]},
    "wide-hyper": {**PROBE_SHAPES["qwen4_exp"], **_TINY_HYPER, **_WIDE, "eos_token_id": [258, 256]},
}

# What a block adds to the residual stream has this share of its size: after 48 layers of two blocks it is still mostly
# the token's embedding, whose parts decide what a router picks.
_RESIDUAL_GAIN = 1 / 64
_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "ple.value_proj.weight", "ple.conv1d.weight")
# A mixer's gates stay near their middle, so that it reads the mean of the streams and injects once what a block says.
_GATE_GAIN = 1 / 16
_GATES = ("input_mix_weight_up.weight", "block_inject_weight.weight")
_ROUTER = "mlp.gate.weight"


def synthetic_config(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """The raw configuration of a shape, with its first ``num_layers`` layers and a small n-gram table.

    Raises ``ConfigError`` for a shape that there is not and for more layers than it has.
    """
    if name not in SYNTHETIC_SHAPES:
        raise ConfigError(f"no synthetic shape '{name}'", f"use one of {', '.join(SYNTHETIC_SHAPES)}")
    raw = copy.deepcopy(SYNTHETIC_SHAPES[name])
    text: dict[str, Any] = raw.get("text_config", raw)
    most = int(text["num_hidden_layers"])
    count = most if num_layers is None else num_layers
    if not 1 <= count <= most:
        raise ConfigError(f"--layers {count}: {name} has {most} layers", f"give 1 to {most}")
    text["num_hidden_layers"] = count
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:count]
    if "ple_layer_ids" in text:
        text["ple_layer_ids"] = [layer for layer in text["ple_layer_ids"] if layer <= count]
    if "ngram_vocab_size_base" in text:
        text["ngram_vocab_size_base"] = min(TABLE_BASE, int(text["ngram_vocab_size_base"]))
    return raw


def synthetic_map(raw: dict[str, Any]) -> WeightMap:
    """The weights that are computed: all but the draft block's, and hashes, which follow from the configuration."""
    family = find(raw)
    whole = family.weight_map(family.read_config(raw))
    dense = tuple(entry for entry in whole.dense if entry.group is None)
    experts = tuple(entry for entry in whole.experts if entry.group is None)
    return dataclasses.replace(whole, dense=dense, experts=experts)


def is_router(entry: WeightEntry) -> bool:
    """Whether a weight picks the routed experts of a layer."""
    return entry.name.endswith(_ROUTER)


def gain_of(name: str) -> float:
    """Size of what a weight computes from inputs of size one. ``experts.down``: of the routed experts."""
    if name.endswith(_RESIDUAL) or name == "experts.down":
        return _RESIDUAL_GAIN
    return _GATE_GAIN if name.endswith(_GATES) else 1.0
