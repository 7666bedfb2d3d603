"""Page-locked memory seen as a tensor, and copied inside a recorded round.

Lives beside ``state.cu``, whose launch it appends. It must not know what is copied.
"""

from __future__ import annotations

import ctypes

import torch

from strata.kernels.cuda.program import Address, Program

__all__ = ["COPY_IN", "floats_at", "record_copy_in"]

COPY_IN = "state.copy_in"

_THREADS = 256


def floats_at(address: int, rows: int, width: int) -> torch.Tensor:
    """Memory of the host as FP32 rows x width; it belongs to the caller and outlives the tensor."""
    raw = (ctypes.c_float * (rows * width)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float32).view(rows, width)


def record_copy_in(program: Program, source: Address, target: torch.Tensor) -> None:
    """One launch that fills a FP32 tensor from an address of the host that the device reads, written between rounds."""
    count = target.numel()
    program.launch(COPY_IN, (-(-count // _THREADS),), _THREADS, source, count, target)
