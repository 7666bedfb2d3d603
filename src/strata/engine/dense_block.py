"""The dense weights on a card: their memory taken as one block before anything is read, then filled.

Lives in ``engine`` because readers and devices meet here. The block comes first so that a card without room says so at
once, and before RAM is page-locked, which a driver may charge to the card. It must not know what a weight is for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from strata.kernels.ops import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.checkpoint.pack_reader import DenseWeight, PackReader
    from strata.engine.devices import RoundDevice
    from strata.layers.ngram import NgramTable

__all__ = ["placer", "take_block", "tensors_of"]

_ALIGNMENT = 512  # bytes between weights on a card, as torch's own allocations have


def take_block(reader: PackReader, device: RoundDevice) -> torch.Tensor:
    """Memory of the device for all dense weights of ``reader``.

    One block, because torch rounds each allocation up: by 0.2 GiB for a model of some hundred matrices, which no plan
    would know.
    """
    own = [record for record in reader.manifest.dense.values() if record.tied_to is None]
    num_tensors = sum(2 if record.format == "q8_0" else 1 for record in own)
    most = reader.dense_bytes + num_tensors * (_ALIGNMENT - 1)
    return torch.empty(most, dtype=torch.uint8, device=device.machine.device)


def placer(block: torch.Tensor) -> Callable[[DenseWeight], DenseWeight]:
    """Puts one weight after the other into ``block``, in the order of the calls; tables, whose rows are gathered, stay
    where they are."""
    end = 0

    def put(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal end
        start, end = end, end + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def place(weight: DenseWeight) -> DenseWeight:
        if isinstance(weight, Matrix):
            scales = None if weight.scales is None else put(weight.scales)
            return replace(weight, data=put(weight.data), scales=scales)
        return put(weight) if isinstance(weight, torch.Tensor) else weight

    return place


def tensors_of(weight: Matrix | torch.Tensor | NgramTable) -> list[torch.Tensor]:
    """What of a weight lies on a card."""
    if isinstance(weight, Matrix):
        return [weight.data] if weight.scales is None else [weight.data, weight.scales]
    return [weight] if isinstance(weight, torch.Tensor) else []
