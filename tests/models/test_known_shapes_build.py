"""Every published shape builds from its own weight map: names and sizes of the map and of the blocks agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata.kernels.ops import Matrix
from strata.models import find
from strata.models.known_shapes import KNOWN_SHAPES

SHEET = {"flash-next": (24_576, 2560 * 640 * 3), "qwen3-30b": (48 * 128, 2048 * 768 * 3)}


@pytest.mark.parametrize("name", sorted(KNOWN_SHAPES))
def test_known_shape_builds_without_memory(name: str) -> None:
    raw = KNOWN_SHAPES[name]
    family = find(raw)
    config = family.read_config(raw)
    wanted = family.weight_map(config)
    weights: dict[str, Any] = {}
    for entry in wanted.dense:
        if entry.tied_to is None and entry.kind != "integers":
            data = torch.empty(entry.shape, device="meta")
            weights[entry.name] = Matrix("f32", data, entry.shape[1]) if entry.kind == "matrix" else data
    model = family.build(config, weights)
    assert model.config is config
    if name in SHEET:
        experts = [entry for entry in wanted.experts if entry.group is None]
        assert sum(entry.num_experts for entry in experts) == SHEET[name][0]
        assert 3 * experts[0].hidden * experts[0].intermediate == SHEET[name][1]
    for kv in ("f32", "bf16"):
        assert config.state_bytes(4096, kv) == config.state_bytes(0, kv) + 4096 * config.position_bytes(kv)
