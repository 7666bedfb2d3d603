"""The row kernels' C interface as Python calls, and the checks that every operation makes of its tensors.

Lives apart from the operations because four files of them share it. Functions are looked up at their first call, so
that importing loads no library. It must not know what an operation means.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p

import torch

from strata.errors import EngineError
from strata.kernels.cpu.library import declare
from strata.kernels.ops import Matrix

__all__ = ["CALLS", "FORMATS", "NativeMatrix", "agree", "dense", "native_matrix"]

FORMATS = {"f32": 0, "bf16": 1, "q8_0": 2}

_P, _I, _N, _F = c_void_p, c_int, c_int64, c_float


class NativeMatrix(Structure):
    """A dense matrix as csrc/cpu/rows_streams.cpp reads it (StrataMatrix)."""

    _fields_ = (
        ("data", _P),
        ("scales", _P),
        ("rows", _N),
        ("columns", _N),
        ("stride", _N),
        ("format", _N),
    )


_M = POINTER(NativeMatrix)

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


class _Calls:
    """``CALLS.linear`` is ``strata_rows_linear`` with its argument types declared."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        call: Callable[..., int] = declare(f"strata_rows_{name}", *_SIGNATURES[name])
        setattr(self, name, call)
        return call


CALLS = _Calls()


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous FP32; ``x`` itself where it already is. Any other type is refused, not converted."""
    if x.dtype != torch.float32:
        raise EngineError(f"a native operation was given {x.dtype}, it takes float32")
    return x if x.is_contiguous() else x.contiguous()


def agree(name: str, left: object, right: object) -> None:
    if left != right:
        raise EngineError(f"{name}: {left} and {right} do not agree")


def native_matrix(matrix: Matrix) -> NativeMatrix:
    data, scales = matrix.data, matrix.scales
    return NativeMatrix(
        data.data_ptr(),
        None if scales is None else scales.data_ptr(),
        data.shape[0],
        matrix.columns,
        data.stride(0),
        FORMATS[matrix.format],
    )
