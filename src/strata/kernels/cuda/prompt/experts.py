"""The routed experts of a prompt's chunk on a card: launches of expert_prompt.cu over picks sorted by expert.

Lives beside its kernels. The rows of a whole chunk are multiplied at once; experts come in an order that the caller
gives, wave after wave, each read where its blob lies then. It must not know tiers, or who else is served. Which
arithmetic each format has is decision record 0130.

Legend: C rows of the chunk, K picks of a row, H hidden width, I inner width, E experts; ' padded to 64.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from strata.kernels.cuda.program import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.quant.layout import ExpertLayout

__all__ = ["TILE_ROWS", "ChunkExperts", "PromptLayer"]

TILE_ROWS = 64  # of expert_prompt.cu, as the others
THREADS = 256
GROUP = 16
PADDED = 64
STAGES = 4
PITCH = {"nvfp4": 144, "q8_0": 192, "bf16": 144}  # bytes between rows in shared memory
RESIDENT_BLOCKS = 2  # of a multiprocessor
SUM_THREADS = 256


class PromptLayer(ctypes.Structure):
    """``Layer`` of expert_prompt.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "order", "tiles", "first", "picks", "scales")),
        *(
            (name, ctypes.c_int)
            for name in (
                "hidden", "intermediate", "hidden_groups", "inner_groups", "top_k", "from_place", "to_place", "unused",
            )
        ),
    )  # fmt: skip


def _padded(value: int) -> int:
    return -(-value // PADDED) * PADDED


class ChunkExperts:
    """Buffers and launches for chunks of up to ``rows`` rows. Owns its tensors: ``x`` takes the rows of a layer."""

    def __init__(self, layout: ExpertLayout, rows: int, top_k: int, device: torch.device, multiprocessors: int) -> None:
        self._layout, self._top_k, self._multiprocessors = layout, top_k, multiprocessors
        hidden, inner = _padded(layout.hidden), _padded(layout.intermediate)
        self.x_CH = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
        self._inner = torch.zeros(rows * top_k, inner, dtype=torch.bfloat16, device=device)
        self._parts = torch.empty(rows * top_k, hidden, dtype=torch.bfloat16, device=device)
        self._kept: list[torch.Tensor] = []
        self._fields: dict[str, int] = {}
        self._tiles_at_most = 0

    @staticmethod
    def row_bytes(layout: ExpertLayout, top_k: int) -> int:
        """Of the buffers, and of the sorting, for each row."""
        hidden, inner = _padded(layout.hidden), _padded(layout.intermediate)
        return 2 * hidden + 2 * top_k * (hidden + inner) + 40 * top_k + 4 * layout.hidden

    def begin_layer(
        self, ids_CK: torch.Tensor, order_E: torch.Tensor, address_E: torch.Tensor, scales_E3: torch.Tensor
    ) -> None:
        """Sorts the picks of a layer's rows, whose values are in ``x_CH``. ``ids`` int32, negative in rows without
        experts; ``order`` int32: the experts as waves will name them; ``address`` int64: their blobs, in that order."""
        experts = order_E.shape[0]
        flat = torch.where(ids_CK < 0, experts, ids_CK).flatten()
        found, picks = torch.sort(flat, stable=True)
        bounds = torch.arange(experts + 1, dtype=flat.dtype, device=flat.device)
        first = torch.searchsorted(found, bounds, out_int32=True)
        counts = first.diff()[order_E.long()]
        tiles = torch.zeros(experts + 1, dtype=torch.int32, device=flat.device)
        tiles[1:] = ((counts + TILE_ROWS - 1) // TILE_ROWS).cumsum(0)
        self._tiles_at_most = flat.numel() // TILE_ROWS
        named = {
            "address": address_E, "order": order_E, "tiles": tiles, "first": first, "picks": picks.int(),
            "scales": scales_E3,
        }  # fmt: skip
        self._kept = list(named.values())
        self._fields = {name: tensor.data_ptr() for name, tensor in named.items()}
        self.counts_E = first.diff()

    def wave(self, first: int, stop: int) -> list[Launch]:
        """Launches that compute the experts [first, stop) of the order. Their blobs are where they were said to be."""
        layout = self._layout
        layer = PromptLayer(
            **self._fields, hidden=_padded(layout.hidden), intermediate=_padded(layout.intermediate),
            hidden_groups=-(-layout.hidden // GROUP), inner_groups=-(-layout.intermediate // GROUP),
            top_k=self._top_k, from_place=first, to_place=stop,
        )  # fmt: skip
        tiles = self._tiles_at_most + stop - first
        shared = STAGES * TILE_ROWS * PITCH[layout.format]
        blocks = self._multiprocessors * RESIDENT_BLOCKS
        wide = -(-layer.inner_groups // 8)
        high = -(-layer.hidden_groups // 16)
        return [
            Launch(
                f"expert_prompt.gate_up_{layout.format}", (min(blocks, tiles * wide), 1, 1), THREADS, shared,
                (layer, self.x_CH, self._inner),
            ),
            Launch(
                f"expert_prompt.down_{layout.format}", (min(blocks, tiles * high), 1, 1), THREADS, shared,
                (layer, self._inner, self._parts),
            ),
        ]  # fmt: skip

    def sums(self, ids_CK: torch.Tensor, weights_CK: torch.Tensor, y_CH: torch.Tensor) -> list[Launch]:
        """y of each row: weighted parts in router order; zero where a row has no experts."""
        rows, top_k = ids_CK.shape
        hidden = self._layout.hidden
        return [
            Launch(
                "expert_prompt.sum_parts", (rows, -(-hidden // (2 * SUM_THREADS)), 1), SUM_THREADS, 0,
                (self._parts, ids_CK, weights_CK, top_k, _padded(hidden), hidden, y_CH),
            )
        ]  # fmt: skip


def addresses(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Blob addresses as ``begin_layer`` takes them."""
    return torch.tensor(values, dtype=torch.int64).to(device)
