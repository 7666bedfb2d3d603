"""The gated delta net, recorded: launches of delta.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.recorder import Recorder, agree, blocks_of
from strata.kernels.ops import DeltaRows, DeltaWeights

__all__ = ["DeltaOps"]

THREADS = 256
WIDEST_HEAD = 256
STATE_WARPS, STATE_COLUMNS = 4, 32
STATE_SLICES = (8, 32, 64)  # rows of the state that a thread holds: kernels of delta.cu


class _DeltaShape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("qkv", "tail", "conv", "b", "a", "log_decay", "dt_bias")),
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "beta", "g")),
        *((n, ctypes.c_int) for n in ("taps", "key_heads", "value_heads", "key_width", "value_width", "unused")),
        ("scale", ctypes.c_float),
        ("unused_too", ctypes.c_int),
    )


class _Rows(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("k", "v", "beta", "g"))


class _StateShape(ctypes.Structure):
    _fields_ = (
        ("pending", _Rows),
        ("now", _Rows),
        *((name, ctypes.c_uint64) for name in ("q", "state", "out")),
        *((n, ctypes.c_int) for n in ("rows", "key_heads", "value_heads", "key_width", "value_width", "unused")),
    )


class DeltaOps(Recorder):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        rows, channels = x_TC.shape
        taps = weight_CW.shape[1]
        agree("causal_conv tail", tuple(tail_UC.shape), ((taps - 1) * dilation, channels))
        agree("causal_conv weight", weight_CW.shape[0], channels)
        y_TC = self.empty(rows, channels)
        self.launch(
            "delta.causal_conv", (self.stride_blocks(x_TC.numel(), THREADS),), THREADS,
            x_TC, tail_UC, weight_CW, rows, channels, taps, dilation, y_TC,
        )  # fmt: skip
        return y_TC

    def delta_inputs(
        self,
        qkv_TC: torch.Tensor,
        tail_UC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        weights: DeltaWeights,
    ) -> tuple[torch.Tensor, DeltaRows]:
        rows, channels = qkv_TC.shape
        keys, heads, key_width, width = weights.key_heads, weights.value_heads, weights.key_width, weights.value_width
        taps = weights.conv_CW.shape[1]
        agree(
            "delta_inputs channels", (channels, weights.conv_CW.shape[0]), (2 * keys * key_width + heads * width,) * 2
        )
        agree("delta_inputs tail", tuple(tail_UC.shape), (taps - 1, channels))
        agree("delta_inputs gates", (tuple(b_TN.shape), tuple(a_TN.shape)), ((rows, heads), (rows, heads)))
        agree("delta_inputs heads", (weights.log_decay_N.numel(), weights.dt_bias_N.numel()), (heads, heads))
        if key_width > WIDEST_HEAD:
            raise EngineError(f"key heads of {key_width} columns, at most {WIDEST_HEAD} are read")
        q_TGD, k_TGD = self.empty(rows, keys, key_width), self.empty(rows, keys, key_width)
        v_TNV = self.empty(rows, heads, width)
        beta_TN, g_TN = self.empty(rows, heads), self.empty(rows, heads)
        shape = _DeltaShape(
            qkv=self.address(qkv_TC), tail=self.address(tail_UC), conv=self.address(weights.conv_CW),
            b=self.address(b_TN), a=self.address(a_TN), log_decay=self.address(weights.log_decay_N),
            dt_bias=self.address(weights.dt_bias_N), q=self.address(q_TGD), k=self.address(k_TGD),
            v=self.address(v_TNV), beta=self.address(beta_TN), g=self.address(g_TN), taps=taps, key_heads=keys,
            value_heads=heads, key_width=key_width, value_width=width, scale=key_width**-0.5,
        )  # fmt: skip
        self.launch("delta.delta_inputs", (2 * keys + heads + 1, rows), 128, shape)
        return q_TGD, DeltaRows(k_TGD, v_TNV, beta_TN, g_TN)

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        """``pending`` holds MAX_WINDOW rows, of which the first ``RoundInputs.accepted`` are folded. ``write`` (a
        prompt) is not recorded: ``EngineError``."""
        if write:
            raise EngineError("a recorded round writes no state but what it folds")
        count, (heads, key_width, width) = self.rows_of(q_TGD), state_NDV.shape
        keys = int(q_TGD.shape[1])
        slice_rows = next((s for s in STATE_SLICES if key_width <= s * STATE_WARPS), 0)
        if not slice_rows:
            raise EngineError(f"a state of {key_width} rows, at most {STATE_SLICES[-1] * STATE_WARPS} are held")
        agree("gated_delta queries", tuple(q_TGD.shape), tuple(rows.k_TGD.shape))
        out_TNV = self.empty(count, heads, width)
        shape = _StateShape(
            pending=_Rows() if pending is None else self._rows(pending, MAX_WINDOW, state_NDV, keys),
            now=self._rows(rows, count, state_NDV, keys), q=self.address(q_TGD), state=self.address(state_NDV),
            out=self.address(out_TNV), rows=count, key_heads=keys, value_heads=heads, key_width=key_width,
            value_width=width,
        )  # fmt: skip
        self.launch(
            f"delta.gated_delta_{slice_rows}", (blocks_of(width, STATE_COLUMNS), heads), 32 * STATE_WARPS,
            self.inputs, shape, shared=(MAX_WINDOW + 2 * count) * slice_rows * STATE_WARPS * 4,
        )  # fmt: skip
        return out_TNV

    def _rows(self, rows: DeltaRows, count: int, state_NDV: torch.Tensor, keys: int) -> _Rows:
        heads, key_width, width = state_NDV.shape
        tensors = (rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN)
        agree(
            "gated_delta shapes",
            [tuple(x.shape) for x in tensors],
            [(count, keys, key_width), (count, heads, width), (count, heads), (count, heads)],
        )
        return _Rows(*[self.address(x) for x in tensors])

    def gated_norm(
        self,
        o_TNV: torch.Tensor,
        z_TNV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: Literal["sigmoid", "silu"],
    ) -> torch.Tensor:
        """Put off: a product of its result takes it into its own launch."""
        width = int(o_TNV.shape[-1])
        agree("gated_norm shapes", (o_TNV.shape, weight_V.numel()), (z_TNV.shape, width))
        y_TNV = self.empty(*o_TNV.shape)
        return self.put_off(
            "gated_norm", y_TNV, lambda: self._norm(o_TNV, z_TNV, weight_V, eps, gate, y_TNV),
            o_TNV, z_TNV, weight_V, eps, gate,
        )  # fmt: skip

    def _norm(
        self,
        o_TNV: torch.Tensor,
        z_TNV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: str,
        y_TNV: torch.Tensor,
    ) -> None:
        width = int(o_TNV.shape[-1])
        count = o_TNV.numel() // width
        self.launch(
            "delta.gated_norm", (blocks_of(count, THREADS // 32),), THREADS,
            o_TNV, z_TNV, weight_V, eps, int(gate == "silu"), count, width, y_TNV,
        )  # fmt: skip
