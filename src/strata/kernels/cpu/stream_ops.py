"""Hyper-connections and the n-gram gate on the native row kernels.

A part of ``CpuOps`` (ops.py), apart to keep files short. It must not know a model family.
"""

from __future__ import annotations

from ctypes import byref

import torch

from strata.kernels.cpu.library import check
from strata.kernels.cpu.row_calls import CALLS, agree, dense, native_matrix
from strata.kernels.ops import HyperWeights, NgramWeights

__all__ = ["StreamOps"]


class StreamOps:
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_TSH, norm_SH = dense(x_TSH), dense(weights.norm_SH)
        rows, streams, columns = x_TSH.shape
        down, up, inject = weights.down, weights.up, weights.inject
        agree("hyper_mix norm", tuple(norm_SH.shape), (streams, columns))
        agree(
            "hyper_mix down and up", (down.columns, up.rows, up.columns), (streams * columns, down.columns, down.rows)
        )
        u_TH = torch.empty((rows, columns))
        c_TS = None
        if inject is not None:
            agree("hyper_mix inject", (inject.rows, inject.columns), (streams, streams * columns))
            c_TS = torch.empty((rows, streams))
        check(
            CALLS.hyper_mix(
                x_TSH.data_ptr(),
                rows,
                streams,
                columns,
                norm_SH.data_ptr(),
                weights.eps,
                byref(native_matrix(down)),
                byref(native_matrix(up)),
                None if inject is None else byref(native_matrix(inject)),
                u_TH.data_ptr(),
                None if c_TS is None else c_TS.data_ptr(),
            )
        )
        return u_TH, c_TS

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        x_TSH, c_TS, y_TH = dense(x_TSH), dense(c_TS), dense(y_TH)
        rows, streams, columns = x_TSH.shape
        agree("hyper_add shapes", (tuple(c_TS.shape), tuple(y_TH.shape)), ((rows, streams), (rows, columns)))
        out = torch.empty_like(x_TSH)
        check(
            CALLS.hyper_add(x_TSH.data_ptr(), c_TS.data_ptr(), y_TH.data_ptr(), rows, streams, columns, out.data_ptr())
        )
        return out

    def ngram_gate(
        self, key_TSH: torch.Tensor, value_TH: torch.Tensor, x_TSH: torch.Tensor, weights: NgramWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_TSH, value_TH, x_TSH = dense(key_TSH), dense(value_TH), dense(x_TSH)
        norms = [dense(w) for w in (weights.norm_key_SH, weights.norm_query_SH, weights.norm_conv_SH)]
        rows, streams, columns = key_TSH.shape
        agree("ngram_gate shapes", (key_TSH.shape, tuple(value_TH.shape)), (x_TSH.shape, (rows, columns)))
        agree("ngram_gate norms", {tuple(w.shape) for w in norms}, {(streams, columns)})
        gated, normed = torch.empty_like(key_TSH), torch.empty_like(key_TSH)
        check(
            CALLS.ngram_gate(
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
