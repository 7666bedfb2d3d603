"""Copies inside a recorded round, and page-locked memory seen as a tensor.

Lives beside ``state.cu``, whose launches it appends: a sequence's state records its rows with it. It must not know what
is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from strata.kernels.cuda.program import Address, Program

__all__ = ["floats_at", "record_copies", "record_copy_from"]

MOST = 6  # of one launch
_THREADS, _BLOCKS = 256, 16


class _Copy(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("count", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class _Copies(ctypes.Structure):
    _fields_ = (("each", _Copy * MOST),)


def floats_at(address: int, rows: int, width: int) -> torch.Tensor:
    """Memory of the host as FP32 rows x width; it belongs to the caller and outlives the tensor."""
    raw = (ctypes.c_float * (rows * width)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float32).view(rows, width)


def record_copies(program: Program, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """One launch that copies each FP32 tensor to the front of its target, at most six."""
    copies = _Copies()
    assert len(pairs) <= MOST, pairs
    for copy, (source, target) in zip(copies.each, pairs, strict=False):
        assert source.is_contiguous(), "copies are of whole arrays"
        assert source.numel() <= target.numel(), "a target has room for the widest window"
        copy.source, copy.target, copy.count = source.data_ptr(), target.data_ptr(), source.numel()
        program.kept += [source, target]
    program.launch("state.copy_arrays", (_BLOCKS, len(pairs)), _THREADS, copies)


def record_copy_from(program: Program, source: Address, target: torch.Tensor) -> None:
    """One launch that fills a FP32 tensor from an address that the device reads."""
    copies = _Copies()
    copy = copies.each[0]
    copy.source, copy.target, copy.count = source, target.data_ptr(), target.numel()
    program.kept.append(target)
    program.launch("state.copy_arrays", (_BLOCKS, 1), _THREADS, copies)
