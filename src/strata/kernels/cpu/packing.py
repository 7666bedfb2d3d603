"""Quantising and packing experts natively: the results of ``strata.quant``, bit for bit, many times as fast.

Lives here because it binds native code; the pack writer calls it. ``quant/blocks.py`` and ``quant/layout.py`` define
what a code and a place are and are what tests compare with. It must not know where weights come from.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from strata.errors import CheckpointError
from strata.kernels.cpu.library import check, declare
from strata.quant.blocks import ExpertFormat, QuantisedMatrix
from strata.quant.blocks import quantise as reference_quantise
from strata.quant.layout import SUPERBLOCK, ExpertLayout

__all__ = ["pack", "pack_weights", "quantise"]

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def _quantise_function() -> ctypes._NamedFuncPointer:
    number, address = ctypes.c_long, ctypes.c_void_p
    return declare("strata_quantise", ctypes.c_int, address, ctypes.c_int, *[number] * 3, *[address] * 4)


@cache
def _pack_function() -> ctypes._NamedFuncPointer:
    return declare("strata_pack_matrix", *[ctypes.c_void_p] * 3, *[ctypes.c_long] * 11)


def quantise(weights: torch.Tensor, format: ExpertFormat) -> QuantisedMatrix:
    """As ``strata.quant.quantise``: weights ``[..., R, K]`` of any float type. Raises ``CheckpointError``."""
    if format == "bf16":
        return reference_quantise(weights, format)
    source = (weights if weights.dtype in _TYPES else weights.float()).contiguous()
    *leading, rows, columns = source.shape
    codes_shape, blocks = (-(-columns // 2), -(-columns // 16)) if format == "nvfp4" else (columns, -(-columns // 32))
    small = torch.uint8 if format == "nvfp4" else torch.int8
    codes = torch.empty(*leading, rows, codes_shape, dtype=small)
    scales = torch.empty(*leading, rows, blocks, dtype=torch.uint8 if format == "nvfp4" else torch.float16)
    tensor_scale = torch.empty(leading, dtype=torch.float32)
    finite = ctypes.c_int()
    check(
        _quantise_function()(
            0 if format == "nvfp4" else 1, source.data_ptr(), _TYPES[source.dtype], tensor_scale.numel(), rows,
            columns, codes.data_ptr(), scales.data_ptr(), tensor_scale.data_ptr(), ctypes.byref(finite),
        )
    )  # fmt: skip
    if not finite.value:
        raise CheckpointError("a weight to be quantised is not finite", "the checkpoint is damaged; fetch it again")
    return QuantisedMatrix(format, columns, codes, scales, tensor_scale)


def pack(
    layout: ExpertLayout, gate: QuantisedMatrix, up: QuantisedMatrix, down: QuantisedMatrix
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``layout.pack``: ``(blobs uint8 [E, blob_bytes], tensor_scales FP32 [E, 3])``."""
    experts = layout.check_matrices(gate, up, down)
    blobs = torch.zeros(experts, layout.blob_bytes, dtype=torch.uint8)
    wide = -(-layout.hidden // SUPERBLOCK) * layout.superblock_bytes
    narrow = -(-layout.intermediate // SUPERBLOCK) * layout.superblock_bytes
    for matrix, offset, stride in ((gate, 0, 2 * wide), (up, wide, 2 * wide), (down, layout.down_offset, narrow)):
        _pack_one(layout, blobs, matrix, offset, stride)
    return blobs, torch.stack([matrix.tensor_scale.float() for matrix in (gate, up, down)], -1).contiguous()


def _pack_one(layout: ExpertLayout, blobs: torch.Tensor, matrix: QuantisedMatrix, offset: int, stride: int) -> None:
    codes = matrix.codes.contiguous()
    scales = codes[..., :0] if matrix.scales is None else matrix.scales.contiguous()
    unit = scales.element_size()
    check(
        _pack_function()(
            codes.data_ptr(), scales.data_ptr() or codes.data_ptr(), blobs.data_ptr(), len(blobs), matrix.rows,
            codes.shape[-1] * codes.element_size(), scales.shape[-1] * unit, unit, layout.blob_bytes, offset, stride,
            -(-matrix.columns // SUPERBLOCK), layout.code_bytes, layout.superblock_bytes,
        )
    )  # fmt: skip


def pack_weights(
    layout: ExpertLayout, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``layout.pack_weights``: gate, up ``[E, I, H]``, down ``[E, H, I]`` of any float type."""
    return pack(layout, *(quantise(weights, layout.format) for weights in (gate, up, down)))
