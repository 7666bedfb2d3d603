"""The dense weights on a card: their memory taken as one block before anything is read, then filled.

Lives in ``engine`` because readers and devices meet here. The block comes first so that a card without room says so at
once, and before RAM is page-locked, which a driver may charge to the card. It must not know what a weight is for.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import torch

from strata.experts.taking import synchronize_quietly
from strata.kernels.ops import Matrix
from strata.memory.staged_upload import StagedUpload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.pack_reader import DenseWeight, PackReader
    from strata.engine.devices import RoundDevice
    from strata.kernels.backend import Backend
    from strata.layers.ngram import NgramTable

__all__ = ["DensePlacer", "take_block", "tensors_of"]

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


class DensePlacer:
    """Puts weights into ``block``, through page-locked ``buffers`` of ``buffer_bytes`` each where there are such. Any
    thread may call it. Borrows all of them.
    """

    def __init__(self, block: torch.Tensor, backend: Backend, buffers: Sequence[int], buffer_bytes: int) -> None:
        self._block, self._end, self._taking = block, 0, Lock()
        self.stream = backend.stream()
        self._upload = StagedUpload(self.stream, buffers, buffer_bytes) if buffers else None

    def __call__(self, weight: DenseWeight) -> DenseWeight:
        """The weight in the block; a table, whose rows are gathered, stays where it is."""
        if isinstance(weight, Matrix):
            scales = None if weight.scales is None else self._put(weight.scales)
            return replace(weight, data=self._put(weight.data), scales=scales)
        return self._put(weight) if isinstance(weight, torch.Tensor) else weight

    def finish(self) -> None:
        """Waits until all that was put is there."""
        self.stream.synchronize()

    def close(self) -> None:
        """Gives the buffers back: no thread writes to them any more, and nothing is copied from them."""
        try:
            if self._upload is not None:
                self._upload.close()
        finally:
            synchronize_quietly(self.stream)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._taking:
            start = self._end
            self._end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        placed = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if self._upload is None:
            return placed.copy_(tensor)
        assert tensor.is_contiguous(), "weights are read whole"
        self._upload.copy(placed.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return placed


def tensors_of(weight: Matrix | torch.Tensor | NgramTable) -> list[torch.Tensor]:
    """What of a weight lies on a card."""
    if isinstance(weight, Matrix):
        return [weight.data] if weight.scales is None else [weight.data, weight.scales]
    return [weight] if isinstance(weight, torch.Tensor) else []
