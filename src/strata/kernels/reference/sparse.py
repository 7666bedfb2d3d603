"""Attention in torch: dense causal, and over the blocks that an index selects.

Lives in ``kernels/reference`` as the plain meaning of three operations of ``Ops``. Rows are processed in slices so
that scores never take more than a bounded piece of memory. It must not know caches or models.
Legend: see ``kernels/ops.py``; L is the number of positions listed for a row.
"""

from __future__ import annotations

import torch

__all__ = ["causal_attention", "gathered_attention", "select_blocks"]

SCORE_ELEMENTS = 1 << 24  # 64 MiB of FP32 scores at once


def _grouped(q_TND: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """T x G x (N/G) x D: query head n reads key/value head n // (N / G)."""
    return torch.unflatten(q_TND, 1, (kv_heads, -1))


def causal_attention(
    q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """``Ops.attention``."""
    end = start + q_TND.shape[0]
    k_PGD, v_PGD = k_PGD[:end].float(), v_PGD[:end].float()
    positions = torch.arange(end, device=q_TND.device)
    rows = max(1, SCORE_ELEMENTS // (end * q_TND.shape[1]))
    outputs = []
    for first in range(0, q_TND.shape[0], rows):
        q = _grouped(q_TND[first : first + rows], k_PGD.shape[1])
        scores = torch.einsum("tgqd,pgd->tgqp", q, k_PGD) * scale
        hidden = positions[None, :] > start + first + torch.arange(q.shape[0], device=q.device)[:, None]
        weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1)
        outputs.append(torch.einsum("tgqp,pgd->tgqd", weights, v_PGD).flatten(1, 2))
    return torch.cat(outputs)


def select_blocks(q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int) -> torch.Tensor:
    """``Ops.select_blocks``. Not differentiable: its result is a list of ids."""
    rows, device = q_TND.shape[0], q_TND.device
    visible_T = (torch.arange(start + 1, start + rows + 1, device=device)) // block
    blocks = int(visible_T[-1])
    listed = torch.full((rows, top_blocks), -1, dtype=torch.int32, device=device)
    if blocks == 0:
        return listed
    ids_B = torch.arange(blocks, device=device)
    scores_TB = torch.zeros(rows, blocks, device=device)
    for head in range(q_TND.shape[1]):
        scores_TB += (q_TND[:, head].detach() @ key_BD[:blocks].detach().T).relu()
    scores_TB = torch.where(scores_TB.isnan(), -1.0, scores_TB)
    scores_TB = scores_TB.masked_fill(ids_B[None, :] >= visible_T[:, None], -2.0)
    best = scores_TB.sort(dim=-1, descending=True, stable=True).indices[:, :top_blocks]
    width = best.shape[1]
    kept = torch.arange(width, device=device)[None, :] < visible_T[:, None]
    ascending = torch.where(kept, best, blocks).sort(dim=-1).values
    listed[:, :width] = torch.where(ascending < blocks, ascending, -1).to(torch.int32)
    return listed


def gathered_attention(
    q_TND: torch.Tensor,
    k_PGD: torch.Tensor,
    v_PGD: torch.Tensor,
    start: int,
    scale: float,
    blocks_TM: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """``Ops.sparse_attention`` with a list: only the listed positions are read."""
    device = q_TND.device
    most = int((blocks_TM >= 0).sum(-1).max())
    blocks_TM = blocks_TM[:, :most].long()
    offsets_J = torch.arange(block, device=device)
    width = (most + 1) * block
    rows = max(1, SCORE_ELEMENTS // (width * k_PGD.shape[1] * q_TND.shape[2]))
    outputs = []
    for first in range(0, q_TND.shape[0], rows):
        q = _grouped(q_TND[first : first + rows], k_PGD.shape[1])
        listed = blocks_TM[first : first + rows]
        position_T = start + first + torch.arange(q.shape[0], device=device)
        tail_T1 = ((position_T + 1) // block)[:, None]
        starts = torch.cat((torch.where(listed < 0, -block, listed * block), tail_T1 * block), dim=1)
        index_TL = (starts[..., None] + offsets_J).flatten(1)
        unseen_TL = (index_TL < 0) | (index_TL > position_T[:, None])
        index_TL = index_TL.clamp(0).minimum(position_T[:, None])
        scores = torch.einsum("tgqd,tlgd->tgql", q, k_PGD[index_TL].float()) * scale
        weights = scores.masked_fill(unseen_TL[:, None, None, :], float("-inf")).softmax(-1)
        outputs.append(torch.einsum("tgql,tlgd->tgqd", weights, v_PGD[index_TL].float()).flatten(1, 2))
    return torch.cat(outputs)
