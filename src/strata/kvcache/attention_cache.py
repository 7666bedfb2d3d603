"""Keys and values of one attention layer, and the index keys of a sparse one, preallocated by position.

Lives in ``kvcache`` because formats and sizes of what a conversation keeps are decided here. A cache holds
positions, not a length: rows are written where the sequence says, and rows beyond its length are scratch that the
next window overwrites. It must not know models or layers' mathematics.

Legend: T rows, P positions, G key/value heads, D width, B blocks, J tokens of a block.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["AttentionCache", "IndexCache", "KvFormat"]

KvFormat = Literal["f32", "bf16"]

_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class IndexCache:
    """Raw index keys per token and the finished keys of complete blocks, FP32. Owns its tensors."""

    selects_always = False

    def __init__(self, max_positions: int, width: int, block: int, device: torch.device) -> None:
        self.block = block
        self.raw_PD = torch.zeros(max_positions, width, device=device)
        self.key_BD = torch.zeros(max_positions // block, width, device=device)

    def append(self, start: int, raw_TD: torch.Tensor) -> tuple[range, torch.Tensor]:
        """Stores raw keys of rows from position ``start``. Returns (first positions of the blocks that these rows
        complete, their raw keys B x J x D as a view). Blocks that hold no new row are finished already."""
        end = start + raw_TD.shape[0]
        self.raw_PD[start:end] = raw_TD.detach()
        first, last = start // self.block, end // self.block
        raw_BJD = self.raw_PD[first * self.block : last * self.block].view(-1, self.block, raw_TD.shape[1])
        return range(first * self.block, last * self.block, self.block), raw_BJD

    def finish(self, start: int, rows: int, key_BD: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Stores the keys of the blocks that ``append`` of the same rows returned. Returns (how many blocks are
        complete at the last row, their keys as a view)."""
        first, last = start // self.block, (start + rows) // self.block
        self.key_BD[first:last] = key_BD.detach()
        return last, self.key_BD[:last]

    @property
    def nbytes(self) -> int:
        return self.raw_PD.nbytes + self.key_BD.nbytes


class AttentionCache:
    """Keys and values P x G x D of one layer in FP32 or BF16, with an ``IndexCache`` if the layer has an indexer."""

    def __init__(
        self,
        max_positions: int,
        heads: int,
        width: int,
        kv: KvFormat,
        device: torch.device,
        index: IndexCache | None = None,
    ) -> None:
        self.index = index
        self.k_PGD = torch.zeros(max_positions, heads, width, dtype=_TYPES[kv], device=device)
        self.v_PGD = torch.zeros_like(self.k_PGD)

    def append(self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores rows from position ``start``; (keys, values) of positions 0 up to the last row, as views."""
        end = start + k_TGD.shape[0]
        self.k_PGD[start:end] = k_TGD.detach()
        self.v_PGD[start:end] = v_TGD.detach()
        return self.k_PGD[:end], self.v_PGD[:end]

    def fill_randomly(self, length: int, seed: int) -> None:
        """Normal numbers at the first ``length`` positions, the same for the same seed and device."""
        generator = torch.Generator(self.k_PGD.device).manual_seed(seed)
        parts = [self.k_PGD[:length], self.v_PGD[:length]]
        if self.index is not None:
            parts += [self.index.raw_PD[:length], self.index.key_BD[: length // self.index.block]]
        for part in parts:
            part.normal_(generator=generator)

    @property
    def nbytes(self) -> int:
        return self.k_PGD.nbytes + self.v_PGD.nbytes + (0 if self.index is None else self.index.nbytes)
