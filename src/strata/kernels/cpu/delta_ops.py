"""The gated delta net on the native row kernels: convolution, inputs, recurrence, gated norm.

A part of ``CpuOps`` (ops.py), apart to keep files short. It must not know caches or models.
"""

from __future__ import annotations

from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import check
from strata.kernels.cpu.row_calls import CALLS, agree, dense
from strata.kernels.ops import DeltaRows, DeltaWeights

__all__ = ["DeltaOps"]


def _tensors(rows: DeltaRows) -> list[torch.Tensor]:
    return [dense(x) for x in (rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN)]


class DeltaOps:
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        x_TC, tail_UC, weight_CW = dense(x_TC), dense(tail_UC), dense(weight_CW)
        rows, channels = x_TC.shape
        taps = weight_CW.shape[1]
        agree("causal_conv tail", tuple(tail_UC.shape), ((taps - 1) * dilation, channels))
        agree("causal_conv weight", weight_CW.shape[0], channels)
        y_TC = torch.empty_like(x_TC)
        check(
            CALLS.causal_conv(
                x_TC.data_ptr(),
                tail_UC.data_ptr(),
                weight_CW.data_ptr(),
                rows,
                channels,
                taps,
                dilation,
                y_TC.data_ptr(),
            )
        )
        return y_TC

    def delta_inputs(
        self,
        qkv_TC: torch.Tensor,
        tail_UC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        weights: DeltaWeights,
    ) -> tuple[torch.Tensor, DeltaRows]:
        qkv_TC, tail_UC, b_TN, a_TN = dense(qkv_TC), dense(tail_UC), dense(b_TN), dense(a_TN)
        conv_CW, log_decay_N, dt_bias_N = map(dense, (weights.conv_CW, weights.log_decay_N, weights.dt_bias_N))
        rows, channels = qkv_TC.shape
        keys, heads, key_width, width = weights.key_heads, weights.value_heads, weights.key_width, weights.value_width
        taps = conv_CW.shape[1]
        agree("delta_inputs channels", (channels, conv_CW.shape[0]), (2 * keys * key_width + heads * width,) * 2)
        agree("delta_inputs tail", tuple(tail_UC.shape), (taps - 1, channels))
        agree("delta_inputs gates", (tuple(b_TN.shape), tuple(a_TN.shape)), ((rows, heads), (rows, heads)))
        agree("delta_inputs heads", (log_decay_N.numel(), dt_bias_N.numel()), (heads, heads))
        q_TGD, k_TGD = (torch.empty((rows, keys, key_width)) for _ in range(2))
        v_TNV = torch.empty((rows, heads, width))
        beta_TN, g_TN = (torch.empty((rows, heads)) for _ in range(2))
        check(
            CALLS.delta_inputs(
                qkv_TC.data_ptr(),
                tail_UC.data_ptr(),
                conv_CW.data_ptr(),
                taps,
                b_TN.data_ptr(),
                a_TN.data_ptr(),
                log_decay_N.data_ptr(),
                dt_bias_N.data_ptr(),
                rows,
                keys,
                heads,
                key_width,
                width,
                key_width**-0.5,
                q_TGD.data_ptr(),
                k_TGD.data_ptr(),
                v_TNV.data_ptr(),
                beta_TN.data_ptr(),
                g_TN.data_ptr(),
            )
        )
        return q_TGD, DeltaRows(k_TGD, v_TNV, beta_TN, g_TN)

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        q_TGD = dense(q_TGD)
        heads, key_width, width = state_NDV.shape
        keys = q_TGD.shape[1]
        if not state_NDV.is_contiguous() or state_NDV.dtype != torch.float32:
            raise EngineError("gated_delta: the state is updated in place and must be contiguous float32")
        now, before = _tensors(rows), None if pending is None else _tensors(pending)
        for tensors in (now,) if before is None else (now, before):
            count = tensors[0].shape[0]
            agree(
                "gated_delta shapes",
                [tuple(x.shape) for x in tensors],
                [(count, keys, key_width), (count, heads, width), (count, heads), (count, heads)],
            )
        agree("gated_delta queries", tuple(q_TGD.shape), tuple(now[0].shape))
        o_TNV = torch.empty_like(now[1])
        check(
            CALLS.gated_delta(
                *([None] * 4 if before is None else [x.data_ptr() for x in before]),
                0 if before is None else before[0].shape[0],
                q_TGD.data_ptr(),
                *[x.data_ptr() for x in now],
                now[0].shape[0],
                keys,
                heads,
                key_width,
                width,
                int(write),
                state_NDV.data_ptr(),
                o_TNV.data_ptr(),
            )
        )
        return o_TNV

    def gated_norm(
        self,
        o_TNV: torch.Tensor,
        z_TNV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: Literal["sigmoid", "silu"],
    ) -> torch.Tensor:
        o_TNV, z_TNV, weight_V = dense(o_TNV), dense(z_TNV), dense(weight_V)
        width = o_TNV.shape[-1]
        agree("gated_norm shapes", (o_TNV.shape, weight_V.numel()), (z_TNV.shape, width))
        y_TNV = torch.empty_like(o_TNV)
        check(
            CALLS.gated_norm(
                o_TNV.data_ptr(),
                z_TNV.data_ptr(),
                weight_V.data_ptr(),
                eps,
                int(gate == "silu"),
                o_TNV.numel() // width,
                width,
                y_TNV.data_ptr(),
            )
        )
        return y_TNV
