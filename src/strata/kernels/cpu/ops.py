"""``CpuOps``: the operations of ``strata.kernels.ops`` on the native row kernels of csrc/cpu/rows*.

Lives here because it is the binding of those kernels: it checks shapes, makes the output and passes addresses,
a few microseconds an operation. Row t of a result is the same bits for any number of rows, threads and for every
instruction set (csrc/cpu/rows.h says how). It must not know a model family or a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import check, declare
from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights, Matrix, NgramWeights

__all__ = ["CpuOps"]

_FORMATS = {"f32": 0, "bf16": 1, "q8_0": 2}
_CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_P, _I, _N, _F = c_void_p, c_int, c_int64, c_float


class _NativeMatrix(Structure):
    _fields_ = (
        ("data", _P),
        ("scales", _P),
        ("rows", _N),
        ("columns", _N),
        ("stride", _N),
        ("format", _N),
    )


_M = POINTER(_NativeMatrix)

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "linear": (_P, _N, _I, _P, _P, _N, _N, _N, _P),
    "embedding": (_P, _N, _I, _P, _P, _N, _N, _N, _P),
    "rms_norm": (_P, _P, _F, _I, _N, _N, _P),
    "rope": (_P, _P, _P, _N, _N, _N, _N, _P),
    "attention": (_P, _P, _P, _I, _N, _N, _N, _N, _N, _F, _P),
    "router": (_P, _N, _N, _N, _I, _P, _P),
    "silu_mul": (_P, _P, _N, _P),
    "sigmoid_mul": (_P, _P, _N, _P),
    "sigmoid_scale": (_P, _P, _N, _N, _P),
    "add": (_P, _P, _N, _P),
    "argmax": (_P, _N, _N, _P),
    "hyper_mix": (_P, _N, _N, _N, _P, _F, _M, _M, _M, _P, _P),
    "hyper_add": (_P, _P, _P, _N, _N, _N, _P),
    "ngram_gate": (*[_P] * 6, _F, _N, _N, _N, _P, _P),
    "causal_conv": (_P, _P, _P, _N, _N, _N, _N, _P),
    "delta_inputs": (_P, _P, _P, _N, _P, _P, _P, _P, *[_N] * 5, _F, *[_P] * 5),
    "gated_delta": (*[_P] * 4, _N, *[_P] * 5, *[_N] * 5, _I, _P, _P),
    "gated_norm": (_P, _P, _P, _F, _I, _N, _N, _P),
    "index_block_keys": (_P, _P, _F, _P, _P, *[_N] * 4, _P),
    "select_blocks": (_P, _N, _N, _N, _P, _N, _N, _N, _P),
    "sparse_attention": (_P, _P, _P, _I, *[_N] * 5, _F, _P, _N, _N, _P),
}


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous FP32; a view of it where it already is."""
    if x.dtype != torch.float32:
        raise EngineError(f"a native operation was given {x.dtype}, it takes float32")
    return x if x.is_contiguous() else x.contiguous()


def _agree(name: str, left: object, right: object) -> None:
    if left != right:
        raise EngineError(f"{name}: {left} and {right} do not agree")


def _native(matrix: Matrix) -> _NativeMatrix:
    data, scales = matrix.data, matrix.scales
    return _NativeMatrix(
        data.data_ptr(),
        None if scales is None else scales.data_ptr(),
        data.shape[0],
        matrix.columns,
        data.stride(0),
        _FORMATS[matrix.format],
    )


class CpuOps:
    """The native implementation of ``strata.kernels.ops.Ops``. Stateless; calls may come from any thread."""

    name = "cpu"

    def __init__(self) -> None:
        calls = {name: declare(f"strata_rows_{name}", *types) for name, types in _SIGNATURES.items()}
        self._calls: dict[str, Callable[..., int]] = dict(calls)
        self._linear = calls["linear"]

    def embedding(self, ids: Sequence[int], table_VH: Matrix) -> torch.Tensor:
        rows = len(ids)
        y_TH = torch.empty((rows, table_VH.columns))
        data, scales = table_VH.data, table_VH.scales
        check(
            self._calls["embedding"](
                (c_int64 * rows)(*ids),
                rows,
                _FORMATS[table_VH.format],
                data.data_ptr(),
                None if scales is None else scales.data_ptr(),
                data.shape[0],
                table_VH.columns,
                data.stride(0),
                y_TH.data_ptr(),
            )
        )
        return y_TH

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        x_TI = _dense(x_TI)
        data, scales, columns = weight_OI.data, weight_OI.scales, weight_OI.columns
        rows, outputs = x_TI.numel() // max(columns, 1), data.shape[0]
        _agree("linear columns", x_TI.shape[-1], columns)
        y_TO = torch.empty((*x_TI.shape[:-1], outputs))
        status = self._linear(
            x_TI.data_ptr(),
            rows,
            _FORMATS[weight_OI.format],
            data.data_ptr(),
            None if scales is None else scales.data_ptr(),
            outputs,
            columns,
            data.stride(0),
            y_TO.data_ptr(),
        )
        if status:
            check(status)
        return y_TO

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        x, weight = _dense(x), _dense(weight)
        columns = x.shape[-1]
        _agree("rms_norm width", weight.numel(), columns)
        y = torch.empty_like(x)
        rows = x.numel() // columns
        check(self._calls["rms_norm"](x.data_ptr(), weight.data_ptr(), eps, int(plus_one), rows, columns, y.data_ptr()))
        return y

    def rope(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        x_TND, cos_TR, sin_TR = _dense(x_TND), _dense(cos_TR), _dense(sin_TR)
        rows, heads, width = x_TND.shape
        half = cos_TR.shape[-1]
        _agree("rope tables", (cos_TR.shape, sin_TR.shape), ((rows, half), (rows, half)))
        if 2 * half > width:
            raise EngineError(f"rope of {2 * half} columns in heads of {width}")
        y_TND = torch.empty_like(x_TND)
        check(
            self._calls["rope"](
                x_TND.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), rows, heads, width, half, y_TND.data_ptr()
            )
        )
        return y_TND

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        q_TND = _dense(q_TND)
        rows, heads, width = q_TND.shape
        self._check_cache(k_PGD, v_PGD, start + rows, width)
        o_TND = torch.empty_like(q_TND)
        check(
            self._calls["attention"](
                q_TND.data_ptr(),
                k_PGD.data_ptr(),
                v_PGD.data_ptr(),
                _CACHE_FORMATS[k_PGD.dtype],
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

    @staticmethod
    def _check_cache(k_PGD: torch.Tensor, v_PGD: torch.Tensor, needed: int, width: int) -> None:
        _agree("shapes of keys and values", k_PGD.shape, v_PGD.shape)
        _agree("types of keys and values", k_PGD.dtype, v_PGD.dtype)
        _agree("widths of queries and keys", width, k_PGD.shape[2])
        if k_PGD.dtype not in _CACHE_FORMATS:
            raise EngineError(f"a cache of {k_PGD.dtype}: float32 and bfloat16 are read")
        if k_PGD.shape[0] < needed:
            raise EngineError(f"{needed} positions are attended, the cache holds {k_PGD.shape[0]}")
        if not (k_PGD.is_contiguous() and v_PGD.is_contiguous()):
            raise EngineError("keys and values must be contiguous")

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = _dense(logits_TE)
        rows, experts = logits_TE.shape
        if not 1 <= top_k <= experts:
            raise EngineError(f"top {top_k} of {experts} experts")
        ids_TK = torch.empty((rows, top_k), dtype=torch.int32)
        weights_TK = torch.empty((rows, top_k))
        check(
            self._calls["router"](
                logits_TE.data_ptr(),
                rows,
                experts,
                top_k,
                int(renormalise),
                ids_TK.data_ptr(),
                weights_TK.data_ptr(),
            )
        )
        return ids_TK, weights_TK

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._pairwise("silu_mul", gate, up)

    def sigmoid_mul(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if gate.shape == x.shape:
            return self._pairwise("sigmoid_mul", gate, x)
        gate, x = _dense(gate), _dense(x)
        _agree("sigmoid_mul shapes", gate.shape, (*x.shape[:-1], 1))
        y = torch.empty_like(x)
        columns = x.shape[-1]
        check(
            self._calls["sigmoid_scale"](
                gate.data_ptr(), x.data_ptr(), x.numel() // max(columns, 1), columns, y.data_ptr()
            )
        )
        return y

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._pairwise("add", x, y)

    def _pairwise(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = _dense(left), _dense(right)
        _agree(f"{name} shapes", left.shape, right.shape)
        y = torch.empty_like(left)
        check(self._calls[name](left.data_ptr(), right.data_ptr(), left.numel(), y.data_ptr()))
        return y

    def argmax(self, logits_TV: torch.Tensor) -> list[int]:
        logits_TV = _dense(logits_TV)
        rows, columns = logits_TV.shape
        ids = (c_int64 * rows)()
        check(self._calls["argmax"](logits_TV.data_ptr(), rows, columns, ids))
        return list(ids)

    def swiglu(self, x_TH: torch.Tensor, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> torch.Tensor:
        return self.linear(self.silu_mul(self.linear(x_TH, gate_IH), self.linear(x_TH, up_IH)), down_HI)

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_TSH, norm_SH = _dense(x_TSH), _dense(weights.norm_SH)
        rows, streams, columns = x_TSH.shape
        down, up, inject = weights.down, weights.up, weights.inject
        _agree("hyper_mix norm", tuple(norm_SH.shape), (streams, columns))
        _agree(
            "hyper_mix down and up", (down.columns, up.rows, up.columns), (streams * columns, down.columns, down.rows)
        )
        u_TH = torch.empty((rows, columns))
        c_TS = None
        if inject is not None:
            _agree("hyper_mix inject", (inject.rows, inject.columns), (streams, streams * columns))
            c_TS = torch.empty((rows, streams))
        check(
            self._calls["hyper_mix"](
                x_TSH.data_ptr(),
                rows,
                streams,
                columns,
                norm_SH.data_ptr(),
                weights.eps,
                byref(_native(down)),
                byref(_native(up)),
                None if inject is None else byref(_native(inject)),
                u_TH.data_ptr(),
                None if c_TS is None else c_TS.data_ptr(),
            )
        )
        return u_TH, c_TS

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        x_TSH, c_TS, y_TH = _dense(x_TSH), _dense(c_TS), _dense(y_TH)
        rows, streams, columns = x_TSH.shape
        _agree("hyper_add shapes", (tuple(c_TS.shape), tuple(y_TH.shape)), ((rows, streams), (rows, columns)))
        out = torch.empty_like(x_TSH)
        check(
            self._calls["hyper_add"](
                x_TSH.data_ptr(), c_TS.data_ptr(), y_TH.data_ptr(), rows, streams, columns, out.data_ptr()
            )
        )
        return out

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        x_TC, tail_UC, weight_CW = _dense(x_TC), _dense(tail_UC), _dense(weight_CW)
        rows, channels = x_TC.shape
        taps = weight_CW.shape[1]
        _agree("causal_conv tail", tuple(tail_UC.shape), ((taps - 1) * dilation, channels))
        _agree("causal_conv weight", weight_CW.shape[0], channels)
        y_TC = torch.empty_like(x_TC)
        check(
            self._calls["causal_conv"](
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
        qkv_TC, tail_UC, b_TN, a_TN = _dense(qkv_TC), _dense(tail_UC), _dense(b_TN), _dense(a_TN)
        conv_CW, log_decay_N, dt_bias_N = map(_dense, (weights.conv_CW, weights.log_decay_N, weights.dt_bias_N))
        rows, channels = qkv_TC.shape
        keys, heads, key_width, width = weights.key_heads, weights.value_heads, weights.key_width, weights.value_width
        taps = conv_CW.shape[1]
        _agree("delta_inputs channels", (channels, conv_CW.shape[0]), (2 * keys * key_width + heads * width,) * 2)
        _agree("delta_inputs tail", tuple(tail_UC.shape), (taps - 1, channels))
        _agree("delta_inputs gates", (tuple(b_TN.shape), tuple(a_TN.shape)), ((rows, heads), (rows, heads)))
        _agree("delta_inputs heads", (log_decay_N.numel(), dt_bias_N.numel()), (heads, heads))
        q_TGD, k_TGD = (torch.empty((rows, keys, key_width)) for _ in range(2))
        v_TNV = torch.empty((rows, heads, width))
        beta_TN, g_TN = (torch.empty((rows, heads)) for _ in range(2))
        check(
            self._calls["delta_inputs"](
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
        q_TGD = _dense(q_TGD)
        heads, key_width, width = state_NDV.shape
        keys = q_TGD.shape[1]
        if not state_NDV.is_contiguous() or state_NDV.dtype != torch.float32:
            raise EngineError("gated_delta: the state is updated in place and must be contiguous float32")
        now, before = _delta_tensors(rows), None if pending is None else _delta_tensors(pending)
        for tensors in (now,) if before is None else (now, before):
            count = tensors[0].shape[0]
            _agree(
                "gated_delta shapes",
                [tuple(x.shape) for x in tensors],
                [(count, keys, key_width), (count, heads, width), (count, heads), (count, heads)],
            )
        _agree("gated_delta queries", tuple(q_TGD.shape), tuple(now[0].shape))
        o_TNV = torch.empty_like(now[1])
        check(
            self._calls["gated_delta"](
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
        o_TNV, z_TNV, weight_V = _dense(o_TNV), _dense(z_TNV), _dense(weight_V)
        width = o_TNV.shape[-1]
        _agree("gated_norm shapes", (o_TNV.shape, weight_V.numel()), (z_TNV.shape, width))
        y_TNV = torch.empty_like(o_TNV)
        check(
            self._calls["gated_norm"](
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

    def index_block_keys(
        self, raw_BJD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_BR: torch.Tensor, sin_BR: torch.Tensor
    ) -> torch.Tensor:
        raw_BJD, weight_D, cos_BR, sin_BR = map(_dense, (raw_BJD, weight_D, cos_BR, sin_BR))
        blocks, members, width = raw_BJD.shape
        half = cos_BR.shape[-1]
        _agree("index_block_keys tables", (cos_BR.shape, sin_BR.shape), ((blocks, half), (blocks, half)))
        _agree("index_block_keys width", (weight_D.numel(), 2 * half <= width), (width, True))
        key_BD = torch.empty((blocks, width))
        check(
            self._calls["index_block_keys"](
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
        q_TND, key_BD = _dense(q_TND), _dense(key_BD)
        rows, heads, width = q_TND.shape
        needed = (start + rows) // block
        if key_BD.shape[0] < needed or (needed and key_BD.shape[1] != width):
            raise EngineError(f"{needed} block keys of {width} are scored, {tuple(key_BD.shape)} are given")
        ids_TM = torch.empty((rows, top_blocks), dtype=torch.int32)
        check(
            self._calls["select_blocks"](
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
        q_TND = _dense(q_TND)
        rows, heads, width = q_TND.shape
        self._check_cache(k_PGD, v_PGD, start + rows, width)
        _agree("sparse_attention lists", (blocks_TM.dtype, blocks_TM.shape[0]), (torch.int32, rows))
        blocks_TM = blocks_TM.contiguous()
        o_TND = torch.empty_like(q_TND)
        check(
            self._calls["sparse_attention"](
                q_TND.data_ptr(),
                k_PGD.data_ptr(),
                v_PGD.data_ptr(),
                _CACHE_FORMATS[k_PGD.dtype],
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

    def ngram_gate(
        self, key_TSH: torch.Tensor, value_TH: torch.Tensor, x_TSH: torch.Tensor, weights: NgramWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_TSH, value_TH, x_TSH = _dense(key_TSH), _dense(value_TH), _dense(x_TSH)
        norms = [_dense(w) for w in (weights.norm_key_SH, weights.norm_query_SH, weights.norm_conv_SH)]
        rows, streams, columns = key_TSH.shape
        _agree("ngram_gate shapes", (key_TSH.shape, tuple(value_TH.shape)), (x_TSH.shape, (rows, columns)))
        _agree("ngram_gate norms", {tuple(w.shape) for w in norms}, {(streams, columns)})
        gated, normed = torch.empty_like(key_TSH), torch.empty_like(key_TSH)
        check(
            self._calls["ngram_gate"](
                key_TSH.data_ptr(),
                value_TH.data_ptr(),
                x_TSH.data_ptr(),
                *[w.data_ptr() for w in norms],
                weights.eps,
                rows,
                streams,
                columns,
                gated.data_ptr(),
                normed.data_ptr(),
            )
        )
        return gated, normed


def _delta_tensors(rows: DeltaRows) -> list[torch.Tensor]:
    return [_dense(x) for x in (rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN)]
