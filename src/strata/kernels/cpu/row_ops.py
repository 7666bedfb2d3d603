"""The operations that every family uses, on the native row kernels: products, norm, rope, router, gates, argmax.

A part of ``CpuOps`` (ops.py), apart to keep files short. It must not know a model family.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import check
from strata.kernels.cpu.row_calls import CALLS, FORMATS, agree, dense
from strata.kernels.ops import Matrix

__all__ = ["RowOps"]


class RowOps:
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def embedding(self, ids: Sequence[int], table_VH: Matrix) -> torch.Tensor:
        rows = len(ids)
        y_TH = torch.empty((rows, table_VH.columns))
        data, scales = table_VH.data, table_VH.scales
        check(
            CALLS.embedding(
                (c_int64 * rows)(*ids),
                rows,
                FORMATS[table_VH.format],
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
        x_TI = dense(x_TI)
        data, scales, columns = weight_OI.data, weight_OI.scales, weight_OI.columns
        rows, outputs = x_TI.numel() // max(columns, 1), data.shape[0]
        agree("linear columns", x_TI.shape[-1], columns)
        y_TO = torch.empty((*x_TI.shape[:-1], outputs))
        status = CALLS.linear(
            x_TI.data_ptr(),
            rows,
            FORMATS[weight_OI.format],
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
        x, weight = dense(x), dense(weight)
        columns = x.shape[-1]
        agree("rms_norm width", weight.numel(), columns)
        y = torch.empty_like(x)
        rows = x.numel() // columns
        check(CALLS.rms_norm(x.data_ptr(), weight.data_ptr(), eps, int(plus_one), rows, columns, y.data_ptr()))
        return y

    def rope(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        x_TND, cos_TR, sin_TR = dense(x_TND), dense(cos_TR), dense(sin_TR)
        rows, heads, width = x_TND.shape
        half = cos_TR.shape[-1]
        agree("rope tables", (cos_TR.shape, sin_TR.shape), ((rows, half), (rows, half)))
        if 2 * half > width:
            raise EngineError(f"rope of {2 * half} columns in heads of {width}")
        y_TND = torch.empty_like(x_TND)
        check(
            CALLS.rope(
                x_TND.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), rows, heads, width, half, y_TND.data_ptr()
            )
        )
        return y_TND

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = dense(logits_TE)
        rows, experts = logits_TE.shape
        if not 1 <= top_k <= experts:
            raise EngineError(f"top {top_k} of {experts} experts")
        ids_TK = torch.empty((rows, top_k), dtype=torch.int32)
        weights_TK = torch.empty((rows, top_k))
        check(
            CALLS.router(
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
        gate, x = dense(gate), dense(x)
        agree("sigmoid_mul shapes", gate.shape, (*x.shape[:-1], 1))
        y = torch.empty_like(x)
        columns = x.shape[-1]
        check(CALLS.sigmoid_scale(gate.data_ptr(), x.data_ptr(), x.numel() // max(columns, 1), columns, y.data_ptr()))
        return y

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._pairwise("add", x, y)

    def _pairwise(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = dense(left), dense(right)
        agree(f"{name} shapes", left.shape, right.shape)
        y = torch.empty_like(left)
        check(getattr(CALLS, name)(left.data_ptr(), right.data_ptr(), left.numel(), y.data_ptr()))
        return y

    def argmax(self, logits_TV: torch.Tensor) -> list[int]:
        logits_TV = dense(logits_TV)
        rows, columns = logits_TV.shape
        ids = (c_int64 * rows)()
        check(CALLS.argmax(logits_TV.data_ptr(), rows, columns, ids))
        return list(ids)
