"""The layouts in which checkpoints of the published naming store a layer's routed experts.

Lives in ``models`` because the names are the families'; it must not import torch.
"""

from __future__ import annotations

from strata.checkpoint.weight_map import ExpertSource

__all__ = ["expert_sources"]


def expert_sources(prefixes: tuple[str, ...]) -> tuple[ExpertSource, ...]:
    """Under each prefix: one tensor per expert and projection; gate and up fused per expert; packed over experts with
    gate and up fused; packed over experts apart. All output first: the width of a tensor never decides that."""
    found: list[ExpertSource] = []
    for prefix in prefixes:
        one = prefix + "{expert}."
        found += [
            ExpertSource(one + "down_proj.weight", one + "gate_proj.weight", one + "up_proj.weight"),
            ExpertSource(one + "down_proj.weight", gate_up=one + "gate_up_proj.weight"),
            ExpertSource(prefix + "down_proj", gate_up=prefix + "gate_up_proj"),
            ExpertSource(prefix + "down_proj", prefix + "gate_proj", prefix + "up_proj"),
        ]
    return tuple(found)
