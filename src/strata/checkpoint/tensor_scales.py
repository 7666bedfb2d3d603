"""Refuses tensor scales of experts that no arithmetic is defined for, or that are of no size like their layer's.

Lives in ``checkpoint`` behind the pack reader: a scale that another program wrote has a right checksum, and would make
noise of every answer. It must not know where the scales come from. Decision record 0118.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from strata.errors import CheckpointError
from strata.quant.blocks import LARGEST_PRODUCT, ExpertFormat

__all__ = ["check_tensor_scales"]

_LARGEST_SPREAD = 1e4  # of a scale over its layer's median
_PROJECTIONS = ("gate", "up", "down")


def check_tensor_scales(
    path: Path,
    scales: torch.Tensor,
    layers: Sequence[int],
    format: ExpertFormat,
    is_zero: Callable[[int, int, int], bool],
) -> None:
    """``scales`` FP32 L x E x 3 out of ``path``; ``is_zero`` tells of layer, expert, and projection whether all its
    weights are zero. Raises ``CheckpointError`` that names the first scale that does not fit."""
    largest = LARGEST_PRODUCT[format]

    def refuse(wrong: torch.Tensor, needed: str) -> None:
        if not bool(wrong.any()):
            return
        position, expert, place = wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"{path}: the tensor scale of layer {layers[position]}, expert {expert}, {_PROJECTIONS[place]} is "
            f"{float(scales[position, expert, place]):g}, needed is one that {needed}",
            "make the pack again with strata pack",
        )

    exact = scales.double()
    if format != "nvfp4":
        refuse(exact != 1, f"is 1, as all are in {format}")
        return
    sound = torch.isfinite(exact) & (exact > 0) & (exact * largest <= torch.finfo(torch.float32).max)
    refuse(~sound, f"is above zero and times {largest:g} a finite FP32 number")
    medians = exact.flatten(1).median(1).values
    far = exact > _LARGEST_SPREAD * medians[:, None, None]
    for position, expert, place in far.nonzero().tolist():
        # A matrix of zeros gets a scale of one, however small its neighbours' are.
        if exact[position, expert, place] == 1 and is_zero(layers[position], expert, place):
            far[position, expert, place] = False
    refuse(far, f"is at most {_LARGEST_SPREAD:,.0f} times the layer's median")
