"""The blob checksum against a plain transcription in Python integers, and its promise about flipped bytes."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cpu.checksum import checksum, checksum_at, copy_with_checksum

MASK = (1 << 64) - 1


def rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK


def mirror(data: bytes) -> int:
    """csrc/cpu/checksum.h in integers of any size."""
    lanes = [0x3C6EF372FE94F82B * (lane + 1) & MASK for lane in range(8)]
    padded = data + bytes(-len(data) % 64)
    for position in range(0, len(padded), 8):
        lane = position // 8 % 8
        word = int.from_bytes(padded[position : position + 8], "little")
        lanes[lane] = rotate(lanes[lane] ^ word, 31) * 0x9E3779B97F4A7C15 & MASK
    result = len(data) * 0xBB67AE8584CAA73B & MASK
    for value in lanes:
        result = rotate(result ^ value, 27) * 0xBB67AE8584CAA73B & MASK
    result ^= result >> 32
    result = result * 0x3C6EF372FE94F82B & MASK
    return result ^ (result >> 29)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 1000, 16385, 262143, 262144, 262221])
def test_equals_its_definition_at_any_alignment(nbytes: int) -> None:
    room = np.random.default_rng(nbytes).integers(0, 256, nbytes + 16, dtype=np.uint8)
    for shift in (0, 1, 5):
        data = room[shift : shift + nbytes]
        assert checksum_at(data.ctypes.data, nbytes) == mirror(data.tobytes())
    target = np.full(nbytes + 8, 7, dtype=np.uint8)
    data = room[3 : 3 + nbytes]
    assert copy_with_checksum(target.ctypes.data, data.ctypes.data, nbytes) == mirror(data.tobytes())
    assert np.array_equal(target[:nbytes], data)
    assert (target[nbytes:] == 7).all()


def test_every_flipped_byte_and_every_cut_changes_it() -> None:
    data = bytearray(np.random.default_rng(1).integers(0, 256, 700, dtype=np.uint8).tobytes())
    whole = checksum(bytes(data))
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            data[position] ^= flip
            assert checksum(bytes(data)) != whole
            data[position] ^= flip
    zeros = {checksum(bytes(count)) for count in range(700)}
    assert len(zeros) == 700


def test_swapped_words_and_repeated_flips_do_not_cancel() -> None:
    data = np.random.default_rng(2).integers(0, 2**63, 64, dtype=np.uint64)
    seen = {checksum(data.view(np.uint8))}
    for first in range(64):
        for second in range(first):
            swapped = data.copy()
            swapped[[first, second]] = swapped[[second, first]]
            flipped = data.copy()
            flipped[[first, second]] ^= np.uint64(1 << 63)
            seen |= {checksum(swapped.view(np.uint8)), checksum(flipped.view(np.uint8))}
    assert len(seen) == 1 + 2 * 64 * 63 // 2
