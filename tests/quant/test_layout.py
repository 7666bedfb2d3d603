"""The blob's layout: every byte's place written out by loops, exact sizes, and a round trip for odd widths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import CheckpointError, ConfigError
from strata.quant import ExpertFormat, ExpertLayout, QuantisedMatrix, dequantise, quantise

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "q8_0", "bf16")


def make(layout: ExpertLayout, experts: int, seed: int = 0) -> tuple[QuantisedMatrix, QuantisedMatrix, QuantisedMatrix]:
    random = torch.Generator().manual_seed(seed)
    hidden, inner = layout.hidden, layout.intermediate
    shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
    gate, up, down = (quantise(torch.randn(shape, generator=random), layout.format) for shape in shapes)
    return gate, up, down


def test_an_expert_of_2560_and_640_is_675_pages_of_nothing_else() -> None:
    layout = ExpertLayout(2560, 640, "nvfp4")
    assert layout.blob_bytes == layout.payload_bytes == 2_764_800 == 675 * 4096
    assert ExpertLayout(2048, 768, "nvfp4").blob_bytes == 3 * 2048 * 768 * 9 // 16
    assert ExpertLayout(2560, 640, "q8_0").payload_bytes == 3 * 2560 * 640 * 34 // 32
    assert ExpertLayout(2560, 640, "bf16").payload_bytes == 3 * 2560 * 640 * 2


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 150), st.integers(1, 150), st.sampled_from(FORMATS))
def test_pack_and_unpack_are_inverse(hidden: int, inner: int, format: ExpertFormat) -> None:
    layout = ExpertLayout(hidden, inner, format)
    before = make(layout, 2)
    blobs, scales = layout.pack(*before)
    assert blobs.shape == (2, layout.blob_bytes)
    assert layout.blob_bytes % 4096 == 0
    assert 0 <= layout.blob_bytes - layout.payload_bytes < 4096
    for old, new in zip(before, layout.unpack(blobs, scales), strict=True):
        assert torch.equal(old.codes, new.codes)
        assert old.columns == new.columns
        assert torch.equal(old.tensor_scale, new.tensor_scale)
        assert (old.scales is None and new.scales is None) or torch.equal(old.scales, new.scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_lies_where_the_page_of_the_layout_says(format: ExpertFormat) -> None:
    layout = ExpertLayout(160, 40, format)
    gate, up, down = make(layout, 1)
    blobs, _ = layout.pack(gate, up, down)
    blob = bytes(blobs[0].tolist())
    seen = bytearray(len(blob))
    wide, narrow, size = 3, 1, layout.superblock_bytes

    def place(name: str, row: int, superblock: int) -> int:
        group = row // 16
        if name == "down":
            return layout.down_offset + (group * narrow + superblock) * size
        return ((group * 2 + (name == "up")) * wide + superblock) * size

    def expect(at: int, value: bytes) -> None:
        assert blob[at : at + len(value)] == value
        seen[at : at + len(value)] = b"\1" * len(value)

    step = {"nvfp4": 8, "q8_0": 4, "bf16": 2}[format]
    for name, matrix in (("gate", gate), ("up", up), ("down", down)):
        rows = matrix.codes[0].contiguous().view(torch.uint8)
        for row in range(matrix.rows):
            for k in range(0, matrix.columns, step):
                at = place(name, row, k // 64) + (k % 64 // step) * 64 + row % 16 * 4
                first = k * 4 // step
                expect(at, bytes(rows[row, first : first + 4].tolist()))
            if matrix.scales is None:
                continue
            width, offset, scale_bytes = (16, 512, 1) if format == "nvfp4" else (32, 1024, 2)
            scales = matrix.scales[0].view(torch.uint8)
            for block in range(-(-matrix.columns // width)):
                at = place(name, row, block * width // 64) + offset
                at += (block % (64 // width) * 16 + row % 16) * scale_bytes
                expect(at, bytes(scales[row, block * scale_bytes : (block + 1) * scale_bytes].tolist()))
    assert not any(byte for byte, known in zip(blob, seen, strict=True) if not known)


def test_many_experts_are_packed_like_one() -> None:
    layout = ExpertLayout(96, 48, "nvfp4")
    gate, up, down = make(layout, 3)
    blobs, scales = layout.pack(gate, up, down)
    for e in range(3):
        one = [
            QuantisedMatrix(m.format, m.columns, m.codes[e : e + 1], m.scales[e : e + 1], m.tensor_scale[e : e + 1])
            for m in (gate, up, down)
            if m.scales is not None
        ]
        blob, scale = layout.pack(*one)
        assert torch.equal(blob[0], blobs[e])
        assert torch.equal(scale[0], scales[e])


def test_dequantise_gives_the_matrices() -> None:
    layout = ExpertLayout(70, 20, "q8_0")
    before = make(layout, 2)
    for old, new in zip(before, layout.dequantise(*layout.pack(*before)), strict=True):
        assert torch.equal(dequantise(old), new)


def test_shapes_that_do_not_fit_are_named() -> None:
    layout = ExpertLayout(64, 32, "nvfp4")
    gate, up, down = make(layout, 2)
    with pytest.raises(CheckpointError, match="expert down is nvfp4 32 x 64, not nvfp4 64 x 32"):
        layout.pack(gate, up, up)
    with pytest.raises(CheckpointError, match="bf16"):
        layout.pack(gate, quantise(dequantise(up), "bf16"), down)
    with pytest.raises(CheckpointError, match="4096 bytes"):
        ExpertLayout(64, 16, "nvfp4").unpack(torch.zeros(2, 100, dtype=torch.uint8), torch.ones(2, 3))


def test_a_damaged_scale_in_a_blob_is_named() -> None:
    layout = ExpertLayout(64, 32, "nvfp4")
    blobs, scales = layout.pack(*make(layout, 1))
    layout.check(blobs, scales, "layer 3")
    blobs[0, layout.down_offset + 512] = 0x7F
    with pytest.raises(CheckpointError, match="layer 3 down: 1 block scales"):
        layout.check(blobs, scales, "layer 3")


@pytest.mark.parametrize("width", [0, -1, 1 << 21])
def test_widths_out_of_range_are_refused(width: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        ExpertLayout(width, 64, "nvfp4")
