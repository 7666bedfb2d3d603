"""Heads of rows, keys and values for caches, keys of the index, recorded: one launch of heads.cu an attention layer.

A part of ``CudaOps`` (ops.py), apart to keep files short. Operations are gathered until another launch of these
operations is recorded; what a sequence's state has left for its caches (``cache_rows``) goes with them. It must not
know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from strata.errors import EngineError
from strata.kernels.cuda.cache_rows import IndexRows, KeyValueRows
from strata.kernels.cuda.recorder import Recorder, agree, blocks_of

__all__ = ["HeadOps"]

MOST_PARTS = 8  # of one launch
MOST_NORMED = 4  # of those: the others are keys and values that are copied
WIDEST_HEAD = 256
WARPS = 4


class _Part(ctypes.Structure):
    """``Part`` of heads.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "weight", "y", "cache")),
        *((name, ctypes.c_int) for name in ("heads", "head_pitch", "row_pitch", "first", "width", "is_bf16")),
        ("eps", ctypes.c_float),
        ("plus", ctypes.c_float),
    )


class _Parts(ctypes.Structure):
    _fields_ = (
        ("of", _Part * MOST_PARTS),
        *((name, ctypes.c_uint64) for name in ("cosines", "sines")),
        *((name, ctypes.c_int) for name in ("count", "heads", "rows", "half")),
    )


class _Blocks(ctypes.Structure):
    """``Blocks`` of heads.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("rows", "before", "keys", "weight", "cosines", "sines")),
        *((name, ctypes.c_int) for name in ("count", "members", "width", "half")),
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_int),
    )


@dataclass(eq=False)
class _Normed:
    """Heads x_TND of a norm with ``weight``; None: they are copied. ``cache_PND`` gets them too."""

    x_TND: torch.Tensor
    weight_D: torch.Tensor | None = None
    y_TND: torch.Tensor | None = None
    eps: float = 0.0
    plus: float = 0.0
    cache_PND: torch.Tensor | None = None


@dataclass(eq=False)
class _Gathered:
    """What goes into one launch."""

    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    parts: list[_Normed] = field(default_factory=list)
    blocks: _Blocks | None = None


class HeadOps(Recorder):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def norm_rope(
        self,
        heads: Sequence[tuple[torch.Tensor, torch.Tensor]],
        eps: float,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        *,
        plus_one: bool,
    ) -> list[torch.Tensor]:
        """Put off: goes with other norms of the same rows, and with what comes of them for the caches."""
        rows, (_, half), width = self.rows_of(cos_TR), cos_TR.shape, int(heads[0][0].shape[2])
        if len(heads) > MOST_NORMED or width > WIDEST_HEAD or 2 * half > width:
            raise EngineError(
                f"norm_rope of {len(heads)} parts with heads of {width} columns, {2 * half} of them rotated"
            )
        agree("norm_rope tables", cos_TR.shape, sin_TR.shape)
        gathered = self._gathered()
        tables = (cos_TR, sin_TR)
        others = gathered.angles is not None and any(a is not b for a, b in zip(gathered.angles, tables, strict=True))
        if others or len(gathered.parts) + len(heads) > MOST_PARTS - 2:
            self.settle()
            gathered = self._gathered()
        gathered.angles = tables
        outputs = []
        for x_TND, weight_D in heads:
            agree("norm_rope shapes", (x_TND.shape[0], x_TND.shape[2], weight_D.numel()), (rows, width, width))
            outputs.append(self.empty(rows, x_TND.shape[1], width))
            gathered.parts.append(_Normed(x_TND, weight_D, outputs[-1], eps, float(plus_one)))
        return outputs

    def index_block_keys(
        self, raw_BJD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_BR: torch.Tensor, sin_BR: torch.Tensor
    ) -> torch.Tensor:
        """Of rows that a state has indexed (``raw_BJD`` stands for them) the keys go to its cache, and what is returned
        holds nothing."""
        count, members, width = raw_BJD.shape
        half = cos_BR.shape[-1]
        agree("index_block_keys tables", (tuple(cos_BR.shape), tuple(sin_BR.shape)), ((count, half),) * 2)
        agree(
            "index_block_keys width", (weight_D.numel(), width <= WIDEST_HEAD, 2 * half <= width), (width, True, True)
        )
        rows = self.program.indexed.pop(raw_BJD.data_ptr(), None)
        blocks = _Blocks(
            weight=self.address(weight_D), cosines=self.address(cos_BR), sines=self.address(sin_BR), count=count,
            members=members, width=width, half=half, eps=eps,
        )  # fmt: skip
        key_BD = self.empty(count, width)
        if rows is None:
            blocks.rows, blocks.keys = self.address(raw_BJD), self.address(key_BD)
            self._launch(_Gathered(blocks=blocks))
        else:
            self._index(rows, blocks)
        return key_BD

    def _index(self, rows: IndexRows, blocks: _Blocks) -> None:
        blocks.rows, blocks.before = self.address(rows.raw_TD), self.address(rows.raw_PD)
        blocks.keys = self.address(rows.key_BD)
        gathered = self._gathered()
        gathered.blocks = blocks
        gathered.parts.append(_Normed(rows.raw_TD[:, None], cache_PND=rows.raw_PD[:, None]))

    def settle_rows(self) -> None:
        """Records everything that a layer has handed to its caches: before they are read."""
        if self.program.appended:
            self._gathered()
        self.settle()

    def _gathered(self) -> _Gathered:
        """What is being gathered; begins where nothing is."""
        waiting = self.waiting("heads")
        if waiting is not None:
            found: _Gathered = waiting[0]
            return found
        gathered = _Gathered()
        self.put_off("heads", self.empty(0), lambda: self._record(gathered), gathered)
        return gathered

    def _record(self, gathered: _Gathered) -> None:
        """With the rows that a state has left for its caches since."""
        appended, self.program.appended = self.program.appended, []
        for rows in appended:
            self._append(gathered, rows)
        self._launch(gathered)

    @staticmethod
    def _append(gathered: _Gathered, rows: KeyValueRows) -> None:
        for x_TGD, cache_PGD in ((rows.k_TGD, rows.k_PGD), (rows.v_TGD, rows.v_PGD)):
            made = [p for p in gathered.parts if p.y_TND is not None and p.y_TND.data_ptr() == x_TGD.data_ptr()]
            if made:
                made[0].cache_PND = cache_PGD
            else:
                gathered.parts.append(_Normed(x_TGD, cache_PND=cache_PGD))

    def _launch(self, gathered: _Gathered) -> None:
        rows = self.rows_of(gathered.parts[0].x_TND) if gathered.parts else 0
        all_of = _Parts(count=len(gathered.parts), rows=rows)
        if gathered.angles is not None:
            cos_TR, sin_TR = gathered.angles
            all_of.cosines, all_of.sines, all_of.half = self.address(cos_TR), self.address(sin_TR), cos_TR.shape[1]
        for place, part in enumerate(gathered.parts):
            all_of.of[place] = self._part(part, all_of.heads)
            all_of.heads += part.x_TND.shape[1]
        blocks = gathered.blocks or _Blocks()
        self.launch(
            "heads.take_rows", (blocks_of(all_of.heads, WARPS), rows + blocks.count), 32 * WARPS,
            self.inputs, all_of, blocks,
        )  # fmt: skip

    def _part(self, part: _Normed, first: int) -> _Part:
        x_TND, cache_PND = part.x_TND, part.cache_PND
        _, heads, width = x_TND.shape
        agree("columns of heads lie together", x_TND.stride(2), 1)
        agree("widths of heads that are held", width <= WIDEST_HEAD, True)
        if cache_PND is not None:
            agree("heads of a cache", tuple(cache_PND.shape[1:]), (heads, width))
            if cache_PND.dtype not in (torch.float32, torch.bfloat16):
                raise EngineError(f"a cache of {cache_PND.dtype}: float32 and bfloat16 are written")
        self.program.kept.append(x_TND)
        return _Part(
            x=x_TND.data_ptr(), weight=self.address(part.weight_D), y=self.address(part.y_TND),
            cache=self.address(cache_PND), heads=heads, head_pitch=x_TND.stride(1), row_pitch=x_TND.stride(0),
            first=first, width=width, is_bf16=int(cache_PND is not None and cache_PND.dtype == torch.bfloat16),
            eps=part.eps, plus=part.plus,
        )  # fmt: skip
