"""N-gram embedding: hashed n-grams read a table, the streams gate what it says, a dilated convolution spreads it.

Lives in ``layers``. The table is far larger than memory in a released model, so it is an argument with one method;
the rows of a window are gathered on the host. It must not know models or where the table lies.
Legend: see ``kernels/ops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from strata.kernels.ops import Matrix, NgramWeights, Ops
from strata.kvcache.parts import NgramPart
from strata.layers.ngram_hash import NgramHash
from strata.layers.rows import Rows

__all__ = ["NgramEmbedding", "NgramTable", "TensorTable"]


class NgramTable(Protocol):
    """A table of rows that lies wherever it fits."""

    def gather(self, rows_TK: npt.NDArray[np.int64], out_TX: torch.Tensor | None = None) -> torch.Tensor:
        """FP32 T x (K * D): the K rows of each token side by side, on the model's device, or in ``out_TX`` in RAM."""


class TensorTable:
    """A table held whole as a tensor (or parameter) V x D: small models and training."""

    def __init__(self, data_VD: torch.Tensor) -> None:
        self.data_VD = data_VD

    def gather(self, rows_TK: npt.NDArray[np.int64], out_TX: torch.Tensor | None = None) -> torch.Tensor:
        index = torch.from_numpy(rows_TK).to(self.data_VD.device)
        found = functional.embedding(index, self.data_VD).float().flatten(1)
        return found if out_TX is None else out_TX.copy_(found)


@dataclass(frozen=True, eq=False)
class NgramEmbedding:
    """``key`` projects gathered rows to S*H, ``value`` to H. The convolution is depthwise over S*H channels."""

    hash: NgramHash
    table: NgramTable
    key: Matrix
    value: Matrix
    weights: NgramWeights
    conv_CW: torch.Tensor
    dilation: int

    def forward(self, ops: Ops, x_TSH: torch.Tensor, rows: Rows, state: NgramPart) -> torch.Tensor:
        """The streams with the n-gram features added; records the rows' ids and convolution inputs."""
        embedded = state.embedded(self.gather, rows.ids, self.key.columns)
        key_TX, value_TH = ops.linears(embedded, [self.key, self.value])
        gated_TSH, normed_TSH = ops.ngram_gate(key_TX.view(x_TSH.shape), value_TH, x_TSH, self.weights)
        normed_TC = normed_TSH.reshape(normed_TSH.shape[0], -1)
        spread_TC = ops.causal_conv(normed_TC, state.tail.rows_UC, self.conv_CW, self.dilation)
        state.tail.record(normed_TC, certain=rows.certain)
        return ops.add(x_TSH, ops.add(gated_TSH, spread_TC.view(x_TSH.shape)))

    def gather(self, windows: list[list[int]], out_TX: torch.Tensor | None = None) -> torch.Tensor:
        """The table's rows of every window's tokens, T x width; in ``out_TX``, memory in RAM, where it is given."""
        rows = [self.hash.rows(window) for window in windows]
        return self.table.gather(rows[0] if len(rows) == 1 else np.concatenate(rows), out_TX)
