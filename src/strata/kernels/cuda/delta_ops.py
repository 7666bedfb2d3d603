"""The gated delta net, recorded: launches of delta.cu and delta_step.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cuda.linear_ops import NORM_WIDTH
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.recorder import Recorder, agree, blocks_of
from strata.kernels.cuda.records import DeltaRecord
from strata.kernels.ops import DeltaRows, DeltaWeights

__all__ = ["DeltaOps"]

THREADS = 256
WIDEST_HEAD = 256
STATE_WARPS, STATE_COLUMNS = 4, 32
STATE_SLICES = (8, 32, 64)  # rows of the state that a thread holds: kernels of delta.cu and delta_step.cu
HEAD_WIDTH, HEAD_TAPS, HEAD_THREADS = 128, 4, 512  # delta_head.h: a block a value head
HEAD_ROOM = 4 * (3 * 4 + 3 * 3 + 2 * MAX_WINDOW + 2 * 2 * 4 + 1) * HEAD_WIDTH + 4 * (4 * MAX_WINDOW + 4)
AHEAD_BYTES = 17 << 20  # what a step brings of later weights: the output's product's, while it waits for its own inputs
STEP_ROOM = 4 * 32 * STATE_WARPS + 4 * MAX_WINDOW + 4  # kRoom of delta_step.cu


class _DeltaShape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("qkv", "tail", "conv", "b", "a", "log_decay", "dt_bias")),
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "beta", "g")),
        *((n, ctypes.c_int) for n in ("taps", "key_heads", "value_heads", "key_width", "value_width", "rows")),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int),
    )


class _DeltaStep(ctypes.Structure):
    _fields_ = (
        ("inputs", _DeltaShape),
        *((name, ctypes.c_uint64) for name in ("kept_z", "kept_k", "kept_v", "kept_beta", "kept_g", "turn")),
        ("state", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
    )


class _HeadStep(ctypes.Structure):
    """``HeadStep`` of delta_head.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("qkv", "conv", "b", "a", "log_decay", "dt_bias", "z", "weight")),
        *((name, ctypes.c_uint64) for name in ("state", "out", "kept_z", "kept_k", "kept_v", "kept_beta", "kept_g")),
        ("turn", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "key_heads")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((name, ctypes.c_int) for name in ("is_silu", "unused")),
    )


@dataclass(frozen=True, eq=False)
class _Norm:
    """The gated norm of a step's result."""

    z_TNV: torch.Tensor
    weight_V: torch.Tensor
    eps: float
    gate: str


class _ConvStep(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "tail", "weight", "kept", "turn", "first", "second", "y")),
        *((name, ctypes.c_int) for name in ("rows", "channels", "taps", "dilation")),
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


def _slice_rows(key_width: int) -> int:
    found = next((s for s in STATE_SLICES if key_width <= s * STATE_WARPS), 0)
    if not found:
        raise EngineError(f"a state of {key_width} rows, at most {STATE_SLICES[-1] * STATE_WARPS} are held")
    return found


class DeltaOps(Recorder):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        """Put off: sums with its result take it into their own launch. A tail that a sequence keeps is moved on too."""
        rows, channels = x_TC.shape
        taps = weight_CW.shape[1]
        agree("causal_conv tail", tuple(tail_UC.shape), ((taps - 1) * dilation, channels))
        agree("causal_conv weight", weight_CW.shape[0], channels)
        y_TC = self.empty(rows, channels)
        record = self.program.tails.get(tail_UC.data_ptr())
        if record is not None:
            self.program.recorded[tail_UC.data_ptr()] = x_TC.data_ptr()

        def launch(y: torch.Tensor, added: Sequence[torch.Tensor]) -> None:
            first, second = [*added, None, None][:2]
            step = _ConvStep(
                x=self.address(x_TC), tail=self.address(tail_UC), weight=self.address(weight_CW),
                kept=self.address(None if record is None else record.rows_SRC), turn=self.address(self.turn),
                first=self.address(first), second=self.address(second), y=self.address(y), rows=rows,
                channels=channels, taps=taps, dilation=dilation,
            )  # fmt: skip
            blocks = rows if record is None else rows + tail_UC.shape[0] + rows
            self.launch("delta.causal_conv", (blocks_of(channels, THREADS), blocks), THREADS, self.inputs, step)

        return self.put_off("sum", y_TC, lambda: launch(y_TC, ()), launch, ())

    def delta_inputs(
        self,
        qkv_TC: torch.Tensor,
        tail_UC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        weights: DeltaWeights,
    ) -> tuple[torch.Tensor, DeltaRows]:
        """Put off: ``gated_delta`` of a state that a sequence keeps takes it into its own launch."""
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
        made = DeltaRows(k_TGD, self.empty(rows, heads, width), self.empty(rows, heads), self.empty(rows, heads))
        shape = _DeltaShape(
            qkv=self.address(qkv_TC), tail=self.address(tail_UC), conv=self.address(weights.conv_CW),
            b=self.address(b_TN), a=self.address(a_TN), log_decay=self.address(weights.log_decay_N),
            dt_bias=self.address(weights.dt_bias_N), q=self.address(q_TGD), k=self.address(k_TGD),
            v=self.address(made.v_TNV), beta=self.address(made.beta_TN), g=self.address(made.g_TN), taps=taps,
            key_heads=keys, value_heads=heads, key_width=key_width, value_width=width, rows=rows,
            scale=key_width**-0.5,
        )  # fmt: skip

        def launch() -> None:
            self.launch("delta.delta_inputs", (2 * keys + heads + 1, rows), 128, shape)

        return self.put_off("delta_inputs", q_TGD, launch, qkv_TC, tail_UC, shape), made

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        """``pending`` holds MAX_WINDOW rows, of which the first ``RoundInputs.accepted`` are folded; a state that a
        sequence keeps has them itself, and takes on ``rows``, whose tensors stay empty. ``write`` (a prompt) is not
        recorded: ``EngineError``."""
        if write:
            raise EngineError("a recorded round writes no state but what it folds")
        record = self.program.deltas.get(state_NDV.data_ptr())
        if record is not None:
            return self._step(q_TGD, state_NDV, record)
        count, (heads, key_width, width) = self.rows_of(q_TGD), state_NDV.shape
        keys = int(q_TGD.shape[1])
        slice_rows = _slice_rows(key_width)
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

    def _step(self, q_TGD: torch.Tensor, state_NDV: torch.Tensor, record: DeltaRecord) -> torch.Tensor:
        """A layer's step from what is kept to what is kept, with the inputs that were put off."""
        count, (heads, key_width, width) = self.rows_of(q_TGD), state_NDV.shape
        inputs = self.take("delta_inputs", q_TGD)
        if inputs is None:
            raise EngineError("gated_delta of a state that is kept takes the queries of delta_inputs just before it")
        qkv_TC, tail_UC, shape = inputs
        address = record.tail.stand_in_UC.data_ptr()
        agree("gated_delta tail", tail_UC.data_ptr(), address)
        agree("gated_delta state", (heads, key_width, width), (shape.value_heads, shape.key_width, shape.value_width))
        self.program.recorded[address] = qkv_TC.data_ptr()
        slice_rows, out_TNV = _slice_rows(key_width), self.empty(count, heads, width)
        addresses = (qkv_TC.data_ptr(), shape.conv, state_NDV.data_ptr())
        if (key_width, width, shape.taps) == (HEAD_WIDTH, HEAD_WIDTH, HEAD_TAPS) and not any(x % 16 for x in addresses):

            def launch(y_TNV: torch.Tensor, norm: _Norm | None) -> None:
                self._head_step(shape, state_NDV, record, y_TNV, norm)

            return self.put_off("delta_step", out_TNV, lambda: launch(out_TNV, None), launch)
        step = _DeltaStep(
            inputs=shape, kept_z=self.address(record.tail.rows_SRC), kept_k=self.address(record.k_SWGD),
            kept_v=self.address(record.v_SWNV), kept_beta=self.address(record.beta_SWN),
            kept_g=self.address(record.g_SWN), turn=self.address(self.turn), state=self.address(state_NDV),
            out=self.address(out_TNV),
        )  # fmt: skip
        lines = shape.taps + MAX_WINDOW + shape.taps - 1 + count
        line_bytes = 4 * (2 * slice_rows * STATE_WARPS + STATE_COLUMNS)
        self.launch(
            f"delta_step.delta_step_{slice_rows}", (blocks_of(width, STATE_COLUMNS), heads), 32 * (STATE_WARPS + 1),
            self.inputs, step, shared=lines * line_bytes + 4 * STEP_ROOM,
        )  # fmt: skip
        return out_TNV

    def _head_step(
        self, shape: _DeltaShape, state_NDV: torch.Tensor, record: DeltaRecord, y_TNV: torch.Tensor, norm: _Norm | None
    ) -> None:
        """A block a value head; more blocks, up to one a multiprocessor, only bring weights."""
        step = _HeadStep(
            qkv=shape.qkv, conv=shape.conv, b=shape.b, a=shape.a, log_decay=shape.log_decay, dt_bias=shape.dt_bias,
            state=self.address(state_NDV), out=self.address(y_TNV), kept_z=self.address(record.tail.rows_SRC),
            kept_k=self.address(record.k_SWGD), kept_v=self.address(record.v_SWNV),
            kept_beta=self.address(record.beta_SWN), kept_g=self.address(record.g_SWN), turn=self.address(self.turn),
            rows=shape.rows, key_heads=shape.key_heads, scale=shape.scale,
        )  # fmt: skip
        if norm is not None:
            step.z, step.weight, step.eps = self.address(norm.z_TNV), self.address(norm.weight_V), norm.eps
            step.is_silu = int(norm.gate == "silu")
        ratio = shape.value_heads // shape.key_heads
        blocks_y = max(shape.key_heads, self.program.multiprocessors // ratio)
        self.launch(
            "delta_step.delta_step_head", (ratio, blocks_y), HEAD_THREADS, self.inputs, step,
            self.ahead(AHEAD_BYTES, ratio * blocks_y), shared=HEAD_ROOM + 4 * 4 * HEAD_WIDTH * shape.rows,
        )  # fmt: skip

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
        """A part of the step that made ``o_TNV`` where that has whole heads. Else put off if heads are of
        ``NORM_WIDTH`` columns: a product of its result takes it into its own launch."""
        width = int(o_TNV.shape[-1])
        agree("gated_norm shapes", (o_TNV.shape, weight_V.numel()), (z_TNV.shape, width))
        y_TNV = self.empty(*o_TNV.shape)
        is_unaligned = any(x.data_ptr() % 16 for x in (o_TNV, z_TNV, weight_V))
        step = None if is_unaligned else self.take("delta_step", o_TNV)
        if step is not None:
            (launch,) = step
            launch(y_TNV, _Norm(z_TNV, weight_V, eps, gate))
            return y_TNV
        if width != NORM_WIDTH or is_unaligned:
            self._norm(o_TNV, z_TNV, weight_V, eps, gate, y_TNV)
            return y_TNV
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
