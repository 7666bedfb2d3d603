"""ReferenceOps: the protocol of ``kernels/ops.py`` in plain torch.

Lives in ``kernels/reference``; one method per operation, each the formula of its docstring there. All operations are
differentiable except ``router``'s ids, ``argmax`` and ``select_blocks``; state is written detached (training uses
``TrainingOps``, which writes none). It must not know models, caches or tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional

from strata.kernels.composed import ComposedOps
from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights, Matrix, NgramWeights
from strata.kernels.reference import sparse
from strata.kernels.reference.delta import chunked_delta, recurrent_delta

__all__ = ["ReferenceOps", "dense_weight"]

RECURRENT_ROWS = 16  # windows of up to this many rows run row by row, exactly as folding does


def dense_weight(matrix: Matrix) -> torch.Tensor:
    """The O x I weights of any format as FP32 (the data itself when it is FP32 already)."""
    if matrix.format == "f32":
        return matrix.data
    if matrix.format == "bf16":
        return matrix.data.float()
    assert matrix.scales is not None
    blocks = torch.unflatten(matrix.data.float(), 1, (-1, 32)) * matrix.scales.float().unsqueeze(-1)
    return blocks.flatten(1)[:, : matrix.columns]


class ReferenceOps(ComposedOps):
    """See ``Ops``. Stateless; one instance may serve any number of models and threads."""

    name = "reference"

    def embedding(self, ids: Sequence[int], table_VH: Matrix) -> torch.Tensor:
        index = torch.as_tensor(ids, dtype=torch.long, device=table_VH.data.device)
        if table_VH.format == "f32":
            return functional.embedding(index, table_VH.data)
        scales = None if table_VH.scales is None else table_VH.scales[index]
        return dense_weight(Matrix(table_VH.format, table_VH.data[index], table_VH.columns, scales))

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        return functional.linear(x_TI, dense_weight(weight_OI))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normed * (1.0 + weight if plus_one else weight)

    def rope(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        half = cos_TR.shape[-1]
        cos, sin = cos_TR[:, None], sin_TR[:, None]
        first, second, rest = torch.split(x_TND, [half, half, x_TND.shape[-1] - 2 * half], dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        return sparse.causal_attention(q_TND, k_PGD, v_PGD, start, scale)

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.where(logits_TE.isnan(), float("-inf"), logits_TE).detach()
        ids = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = logits_TE.softmax(-1).gather(-1, ids)
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32), weights

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate) * up

    def sigmoid_mul(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gate.sigmoid() * x

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def argmax(self, logits_TV: torch.Tensor) -> list[int]:
        width = logits_TV.shape[-1]
        largest = logits_TV.amax(-1, keepdim=True)
        ids = torch.arange(width, device=logits_TV.device)
        lowest = torch.where(logits_TV == largest, ids, width).amin(-1)
        found: list[int] = torch.where(lowest == width, -1, lowest).tolist()
        return found

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        streams = x_TSH.shape[1]
        n_TSH = self.rms_norm(x_TSH, weights.norm_SH, weights.eps, plus_one=True)
        flat = n_TSH.flatten(1)
        mix = self.linear(functional.silu(self.linear(flat, weights.down) / streams), weights.up).sigmoid()
        u_TH = (mix.view_as(n_TSH) * n_TSH).mean(1)
        if weights.inject is None:
            return u_TH, None
        return u_TH, 2.0 * (self.linear(flat, weights.inject) / streams).sigmoid()

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        return x_TSH + c_TS[:, :, None] * y_TH[:, None, :]

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        return _convolve(torch.cat((tail_UC, x_TC)).unsqueeze(0), weight_CW, dilation).squeeze(0)

    def delta_inputs(
        self,
        qkv_TC: torch.Tensor,
        tail_UC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        weights: DeltaWeights,
    ) -> tuple[torch.Tensor, DeltaRows]:
        key_channels = weights.key_heads * weights.key_width
        mixed = self.causal_conv(qkv_TC, tail_UC, weights.conv_CW)
        q, k, v = torch.split(mixed, [key_channels, key_channels, mixed.shape[-1] - 2 * key_channels], dim=-1)
        q_TGD = _unit_length(torch.unflatten(q, -1, (weights.key_heads, -1))) * weights.key_width**-0.5
        g_TN = -weights.log_decay_N.exp() * functional.softplus(a_TN + weights.dt_bias_N)
        rows = DeltaRows(
            k_TGD=_unit_length(torch.unflatten(k, -1, (weights.key_heads, -1))),
            v_TNV=torch.unflatten(v, -1, (weights.value_heads, -1)).contiguous(),
            beta_TN=b_TN.sigmoid(),
            g_TN=g_TN,
        )
        return q_TGD, rows

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        if pending is not None:
            _, folded = recurrent_delta(None, *_batched(pending), state_NDV.unsqueeze(0))
            state_NDV.copy_(folded.squeeze(0).detach())
        if write and q_TGD.shape[0] > RECURRENT_ROWS:
            out, after = chunked_delta(q_TGD.unsqueeze(0), *_batched(rows), state_NDV.unsqueeze(0))
        else:
            found, after = recurrent_delta(q_TGD.unsqueeze(0), *_batched(rows), state_NDV.unsqueeze(0))
            assert found is not None
            out = found
        if write:
            state_NDV.copy_(after.squeeze(0).detach())
        return out.squeeze(0)

    def gated_norm(
        self,
        o_TNV: torch.Tensor,
        z_TNV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: Literal["sigmoid", "silu"],
    ) -> torch.Tensor:
        return self.rms_norm(o_TNV, weight_V, eps) * (z_TNV.sigmoid() if gate == "sigmoid" else functional.silu(z_TNV))

    def index_block_keys(
        self, raw_BJD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_BR: torch.Tensor, sin_BR: torch.Tensor
    ) -> torch.Tensor:
        key_BD = self.rms_norm(raw_BJD.mean(1), weight_D, eps, plus_one=True)
        return self.rope(key_BD.unsqueeze(1), cos_BR, sin_BR).squeeze(1)

    def select_blocks(
        self, q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int
    ) -> torch.Tensor:
        return sparse.select_blocks(q_TND, key_BD, start, block, top_blocks)

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
        return sparse.gathered_attention(q_TND, k_PGD, v_PGD, start, scale, blocks_TM, block)

    def ngram_gate(
        self, key_TSH: torch.Tensor, value_TH: torch.Tensor, x_TSH: torch.Tensor, weights: NgramWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.rms_norm(key_TSH, weights.norm_key_SH, weights.eps, plus_one=True)
        query = self.rms_norm(x_TSH, weights.norm_query_SH, weights.eps, plus_one=True)
        match_TS1 = (key * query).sum(-1, keepdim=True) / key.shape[-1] ** 0.5
        match_TS1 = match_TS1.sign() * match_TS1.abs().clamp_min(1e-6).sqrt()
        gated = match_TS1.sigmoid() * value_TH[:, None, :]
        return gated, self.rms_norm(gated, weights.norm_conv_SH, weights.eps, plus_one=True)


def _convolve(z_BTC: torch.Tensor, weight_CW: torch.Tensor, dilation: int) -> torch.Tensor:
    """silu of the depthwise convolution over rows that already have their tail in front."""
    out = functional.conv1d(z_BTC.mT, weight_CW.unsqueeze(1), groups=weight_CW.shape[0], dilation=dilation)
    return functional.silu(out).mT.contiguous()


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _batched(rows: DeltaRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (rows.k_TGD.unsqueeze(0), rows.v_TNV.unsqueeze(0), rows.beta_TN.unsqueeze(0), rows.g_TN.unsqueeze(0))
