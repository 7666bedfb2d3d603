"""Attention over a cache, over selected blocks, and the selection, on the native row kernels.

A part of ``CpuOps`` (ops.py), apart to keep files short. It must not know caches or models.
"""

from __future__ import annotations

import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import check
from strata.kernels.cpu.row_calls import CALLS, agree, dense

__all__ = ["AttentionOps"]

CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1}


def check_cache(k_PGD: torch.Tensor, v_PGD: torch.Tensor, needed: int, width: int) -> None:
    agree("shapes of keys and values", k_PGD.shape, v_PGD.shape)
    agree("types of keys and values", k_PGD.dtype, v_PGD.dtype)
    agree("widths of queries and keys", width, k_PGD.shape[2])
    if k_PGD.dtype not in CACHE_FORMATS:
        raise EngineError(f"a cache of {k_PGD.dtype}: float32 and bfloat16 are read")
    if k_PGD.shape[0] < needed:
        raise EngineError(f"{needed} positions are attended, the cache holds {k_PGD.shape[0]}")
    if not (k_PGD.is_contiguous() and v_PGD.is_contiguous()):
        raise EngineError("keys and values must be contiguous")


class AttentionOps:
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        q_TND = dense(q_TND)
        rows, heads, width = q_TND.shape
        check_cache(k_PGD, v_PGD, start + rows, width)
        o_TND = torch.empty_like(q_TND)
        check(
            CALLS.attention(
                q_TND.data_ptr(),
                k_PGD.data_ptr(),
                v_PGD.data_ptr(),
                CACHE_FORMATS[k_PGD.dtype],
                rows,
                heads,
                k_PGD.shape[1],
                width,
                start,
                scale,
                o_TND.data_ptr(),
            )
        )
        return o_TND

    def index_block_keys(
        self, raw_BJD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_BR: torch.Tensor, sin_BR: torch.Tensor
    ) -> torch.Tensor:
        raw_BJD, weight_D, cos_BR, sin_BR = map(dense, (raw_BJD, weight_D, cos_BR, sin_BR))
        blocks, members, width = raw_BJD.shape
        half = cos_BR.shape[-1]
        agree("index_block_keys tables", (cos_BR.shape, sin_BR.shape), ((blocks, half), (blocks, half)))
        agree("index_block_keys width", (weight_D.numel(), 2 * half <= width), (width, True))
        key_BD = torch.empty((blocks, width))
        check(
            CALLS.index_block_keys(
                raw_BJD.data_ptr(),
                weight_D.data_ptr(),
                eps,
                cos_BR.data_ptr(),
                sin_BR.data_ptr(),
                blocks,
                members,
                width,
                half,
                key_BD.data_ptr(),
            )
        )
        return key_BD

    def select_blocks(
        self, q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int
    ) -> torch.Tensor:
        q_TND, key_BD = dense(q_TND), dense(key_BD)
        rows, heads, width = q_TND.shape
        needed = (start + rows) // block
        if key_BD.shape[0] < needed or (needed and key_BD.shape[1] != width):
            raise EngineError(f"{needed} block keys of {width} are scored, {tuple(key_BD.shape)} are given")
        ids_TM = torch.empty((rows, top_blocks), dtype=torch.int32)
        check(
            CALLS.select_blocks(
                q_TND.data_ptr(),
                rows,
                heads,
                width,
                key_BD.data_ptr(),
                start,
                block,
                top_blocks,
                ids_TM.data_ptr(),
            )
        )
        return ids_TM

    def sparse_attention(
        self,
        q_TND: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        start: int,
        scale: float,
        blocks_TM: torch.Tensor | None,
        block: int,
    ) -> torch.Tensor:
        if blocks_TM is None:
            return self.attention(q_TND, k_PGD, v_PGD, start, scale)
        q_TND = dense(q_TND)
        rows, heads, width = q_TND.shape
        check_cache(k_PGD, v_PGD, start + rows, width)
        agree("sparse_attention lists", (blocks_TM.dtype, blocks_TM.shape[0]), (torch.int32, rows))
        blocks_TM = blocks_TM.contiguous()
        o_TND = torch.empty_like(q_TND)
        check(
            CALLS.sparse_attention(
                q_TND.data_ptr(),
                k_PGD.data_ptr(),
                v_PGD.data_ptr(),
                CACHE_FORMATS[k_PGD.dtype],
                rows,
                heads,
                k_PGD.shape[1],
                width,
                start,
                scale,
                blocks_TM.data_ptr(),
                blocks_TM.shape[1],
                block,
                o_TND.data_ptr(),
            )
        )
        return o_TND
