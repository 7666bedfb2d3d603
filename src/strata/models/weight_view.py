"""Typed access to loaded weights by canonical name, with their shapes checked against the config.

Lives in ``models`` because families share it. It must not know where weights come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from strata.errors import CheckpointError
from strata.kernels.ops import Matrix

if TYPE_CHECKING:
    from strata.layers.ngram import NgramTable
    from strata.models.family import Weights

__all__ = ["WeightView", "matrix_rows"]


class WeightView:
    """``prefix`` is put before every name, so a block asks for its own names only."""

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self._weights = weights
        self._prefix = prefix

    def under(self, prefix: str) -> WeightView:
        return WeightView(self._weights, self._prefix + prefix)

    def has(self, name: str) -> bool:
        return self._prefix + name in self._weights

    def _get(self, name: str) -> Matrix | torch.Tensor | NgramTable:
        try:
            return self._weights[self._prefix + name]
        except KeyError:
            raise CheckpointError(f"weight {self._prefix + name} was not loaded") from None

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A ``Matrix`` of exactly this size; a plain FP32 tensor is taken as one."""
        found = self._get(name)
        if isinstance(found, torch.Tensor) and found.dim() == 2:
            found = Matrix("f32", found, int(found.shape[1]))
        if not isinstance(found, Matrix) or (found.rows, found.columns) != (rows, columns):
            shape = f"{found.rows} x {found.columns}" if isinstance(found, Matrix) else type(found).__name__
            raise CheckpointError(f"weight {self._prefix + name} is {shape}, {rows} x {columns} is expected")
        return found

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """An FP32 tensor of exactly this many values, viewed in this shape."""
        found = self._get(name)
        count = 1
        for size in shape:
            count *= size
        if not isinstance(found, torch.Tensor) or found.numel() != count or found.dtype != torch.float32:
            kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise CheckpointError(f"weight {self._prefix + name} is {kind}, FP32 {shape} is expected")
        return found.reshape(shape)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """The values of an optional integer tensor, None when it was not loaded."""
        if not self.has(name):
            return None
        found = self._get(name)
        assert isinstance(found, torch.Tensor)
        return tuple(int(value) for value in found.flatten().tolist())

    def table(self, name: str) -> torch.Tensor | NgramTable:
        found = self._get(name)
        if isinstance(found, Matrix):
            raise CheckpointError(f"weight {self._prefix + name} is a matrix, a table is expected")
        return found


def matrix_rows(matrix: Matrix, first: int, last: int) -> Matrix:
    """Rows first .. last - 1 of a matrix as a view."""
    scales = None if matrix.scales is None else matrix.scales[first:last]
    return Matrix(matrix.format, matrix.data[first:last], matrix.columns, scales)
