"""The dense weights on a card: their memory taken as one block before anything is read, then filled.

Lives in ``engine`` because readers and devices meet here. The block comes first so that a card without room says so at
once, and before RAM is page-locked, which a driver may charge to the card. It must not know what a weight is for.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

import torch

from strata.kernels.ops import Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.pack_reader import DenseWeight, PackReader
    from strata.engine.devices import RoundDevice
    from strata.kernels.backend import Backend, DeviceEvent
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
    """Puts weights into ``block``, through page-locked ``buffers`` of ``buffer_bytes`` each where there are such: what
    a driver stages by itself is one thread's copy, a fifth of the link's rate. Any thread may call it.

    Borrows the block, the buffers and the backend.
    """

    def __init__(self, block: torch.Tensor, backend: Backend, buffers: Sequence[int], buffer_bytes: int) -> None:
        self._block, self._buffer_bytes = block, buffer_bytes
        self._end, self._taking = 0, Lock()
        self.stream = backend.stream()
        self._buffers: SimpleQueue[tuple[int, DeviceEvent | None]] = SimpleQueue()
        self._staged = bool(buffers)
        for address in buffers:
            self._buffers.put((address, None))

    def __call__(self, weight: DenseWeight) -> DenseWeight:
        """The weight in the block; a table, whose rows are gathered, stays where it is."""
        if isinstance(weight, Matrix):
            scales = None if weight.scales is None else self._put(weight.scales)
            return replace(weight, data=self._put(weight.data), scales=scales)
        return self._put(weight) if isinstance(weight, torch.Tensor) else weight

    def finish(self) -> None:
        """Waits until all that was put is there."""
        self.stream.synchronize()

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._taking:
            start = self._end
            self._end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        placed = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if not self._staged:
            return placed.copy_(tensor)
        tensor = tensor.contiguous()
        for at in range(0, tensor.nbytes, self._buffer_bytes):
            count = min(self._buffer_bytes, tensor.nbytes - at)
            buffer, used = self._buffers.get()
            try:
                if used is not None:
                    used.synchronize()
                ctypes.memmove(buffer, tensor.data_ptr() + at, count)
                self.stream.copy(placed.data_ptr() + at, buffer, count)
                used = self.stream.record()
            finally:
                self._buffers.put((buffer, used))
        return placed


def tensors_of(weight: Matrix | torch.Tensor | NgramTable) -> list[torch.Tensor]:
    """What of a weight lies on a card."""
    if isinstance(weight, Matrix):
        return [weight.data] if weight.scales is None else [weight.data, weight.scales]
    return [weight] if isinstance(weight, torch.Tensor) else []
