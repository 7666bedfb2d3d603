"""``CpuOps``: the operations of ``strata.kernels.ops`` on the native row kernels of csrc/cpu/rows*.

Lives here because it is the binding of those kernels: it checks shapes, makes the output and passes addresses,
a few microseconds an operation. Row t of a result is the same bits for any number of rows, threads and for every
instruction set (csrc/cpu/rows.h says how). It must not know a model family or a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import check, declare

if TYPE_CHECKING:
    from strata.kernels.ops import Matrix

__all__ = ["CpuOps"]

_FORMATS = {"f32": 0, "bf16": 1, "q8_0": 2}
_CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
_P, _I, _N, _F = c_void_p, c_int, c_int64, c_float

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
}


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous FP32; a view of it where it already is."""
    if x.dtype != torch.float32:
        raise EngineError(f"a native operation was given {x.dtype}, it takes float32")
    return x if x.is_contiguous() else x.contiguous()


def _agree(name: str, left: object, right: object) -> None:
    if left != right:
        raise EngineError(f"{name}: {left} and {right} do not agree")


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
