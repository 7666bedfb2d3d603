"""Padding of a blob may hold anything: results and flags are those of zeros there, on every level and in CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.cpu import library
from strata.quant import ExpertFormat, ExpertLayout
from tests.kernels.test_cuda_experts import same
from tests.kernels.test_experts import FORMATS, LEVELS, Packed, levels_of, make, only, rows_of

# (hidden, intermediate): a width of each kind of last superblock: less than 16 of 64 weights, 17 to 32, 33 to 48, 49 to
# 63, none of padding; odd ones; one weight, one row.
WIDTHS = [(70, 25), (96, 40), (107, 33), (176, 57), (127, 64), (64, 63), (193, 129), (1, 1)]
# 0xFF: scales that are NaN, codes of -6 and -1, NaN. 0x7F: E4M3's NaN, an FP16 NaN, the largest codes. 0xF8: infinity.
BYTES = (0xFF, 0x7F, 0xF8)


def poison(layout: ExpertLayout, blobs: torch.Tensor, byte: int) -> torch.Tensor:
    """Blobs with every byte of padding set: rows past a matrix's last, weights past a row's last, and their scales."""
    found = blobs.numpy().copy()
    wide, narrow = (-(-width // 64) * layout.superblock_bytes for width in (layout.hidden, layout.intermediate))
    pairs = found[:, : layout.down_offset].reshape(len(found), -1, 2, wide)
    down = found[:, layout.down_offset : layout.payload_bytes].reshape(len(found), -1, narrow)
    for matrix, rows, columns in (
        (pairs[:, :, 0], layout.intermediate, layout.hidden),
        (pairs[:, :, 1], layout.intermediate, layout.hidden),
        (down, layout.hidden, layout.intermediate),
    ):
        is_padding = padding_of(layout, matrix.shape[1], rows, columns)
        matrix[:] = np.where(is_padding, np.uint8(byte), matrix)  # a view of `found`
    return torch.from_numpy(found)


def padding_of(layout: ExpertLayout, groups: int, rows: int, columns: int) -> np.ndarray:
    """bool [groups, bytes of a group]: which bytes hold nothing of a rows x columns matrix."""
    superblocks = -(-columns // 64)
    row = np.arange(groups)[:, None, None] * 16 + np.arange(16)  # [groups, 1, 16]
    per_word = {"nvfp4": 8, "q8_0": 4, "bf16": 2}[layout.format]  # weights in 4 bytes
    first = np.arange(superblocks * 64 // per_word) * per_word
    of_byte = first[:, None] + np.arange(4) * per_word // 4  # [words, 4]: the byte's first weight
    codes = (row[..., None] >= rows) | (of_byte[None, :, None] >= columns)
    codes = codes.reshape(groups, superblocks, layout.code_bytes)
    if layout.format == "bf16":
        return codes.reshape(groups, -1)
    width, size = (16, 1) if layout.format == "nvfp4" else (32, 2)
    block = np.arange(superblocks * 64 // width) * width
    scales = (row >= rows) | (block[None, :, None] >= columns)
    scales = np.repeat(scales, size, -1).reshape(groups, superblocks, -1)
    return np.concatenate([codes, scales], -1).reshape(groups, -1)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_no_padding_is_what_unpack_reads(format: ExpertFormat) -> None:
    for hidden, inner in WIDTHS:
        packed = make(hidden, inner, format)
        blobs = packed.blobs.clone()
        assert torch.equal(poison(packed.layout, blobs, 0)[:, : packed.layout.payload_bytes],
                           blobs[:, : packed.layout.payload_bytes])  # fmt: skip
        before = packed.layout.unpack(blobs, torch.from_numpy(packed.scales))
        after = packed.layout.unpack(poison(packed.layout, blobs, 0xFF), torch.from_numpy(packed.scales))
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
            assert (one.scales is None) == (other.scales is None)
            assert one.scales is None or other.scales is None or torch.equal(one.scales, other.scales)


def poisoned(packed: Packed, byte: int) -> None:
    packed.blobs.copy_(poison(packed.layout, packed.blobs, byte))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_poisoned_padding_changes_nothing_on_any_level(format: ExpertFormat, level: str) -> None:
    for hidden, inner in WIDTHS:
        packed = make(hidden, inner, format)
        x = rows_of(70, hidden)
        x[3] = 0.0
        expected = packed.expected(x[:9], only(9))
        assert not expected[1].any()
        whole = packed.compute(x, only(70))
        for byte in BYTES:
            poisoned(packed, byte)
            for name in levels_of(level):
                library.select_isa(name)
                for count in (1, 2, 3, 4, 5, 9):
                    found, flags = packed.compute(x[:count], only(count))
                    assert np.array_equal(found, expected[0][:count]), (hidden, inner, hex(byte), name, count)
                    assert not flags.any(), (hidden, inner, hex(byte), name, count)
                found, flags = packed.compute(x, only(70))  # more rows than one decoding serves
                assert np.array_equal(found, whole[0]), (hidden, inner, hex(byte), name)
                assert not flags.any()


@pytest.mark.parametrize("format", FORMATS)
def test_poisoned_padding_changes_nothing_in_cuda(format: ExpertFormat) -> None:
    for hidden, inner in WIDTHS:
        packed = make(hidden, inner, format, experts=2)
        scales = torch.from_numpy(packed.scales)
        for rows, byte in ((1, 0xFF), (2, 0x7F), (4, 0xF8), (5, 0xFF)):
            flags = same(packed.layout, poison(packed.layout, packed.blobs, byte), scales, rows_of(rows, hidden),
                         np.zeros((rows, 1), np.int32))  # fmt: skip
            assert not flags.any()
