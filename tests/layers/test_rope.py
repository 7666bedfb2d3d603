"""Rotary tables: exact against float64, the same bits however they are asked for."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels.reference import ReferenceOps
from strata.layers.rope import PAGE, RopeTable

CPU = torch.device("cpu")


@pytest.mark.parametrize("position", [0, 1, 255, 256, 4_000, 262_143])
def test_values_are_float64_rounded_once(position: int) -> None:
    cos, sin = RopeTable(1e7, 64, CPU).rows(position, 1)
    for i in range(32):
        angle = position * 1e7 ** (-2 * i / 64)
        assert float(cos[0, i]) == pytest.approx(math.cos(angle), abs=4e-8)
        assert float(sin[0, i]) == pytest.approx(math.sin(angle), abs=4e-8)


def test_rows_are_the_same_bits_in_any_window() -> None:
    whole = RopeTable(1e4, 16, CPU).rows(0, 3 * PAGE)
    table = RopeTable(1e4, 16, CPU)
    for start, count in ((PAGE - 2, 4), (700, 1), (1, 2 * PAGE), (0, 1), (PAGE, PAGE)):
        for found, expected in zip(table.rows(start, count), whole, strict=True):
            assert torch.equal(found, expected[start : start + count])
    for found, expected in zip(table.at(range(0, 3 * PAGE, 4)), whole, strict=True):
        assert torch.equal(found, expected[::4])


def test_rotation_pairs_halves_and_copies_the_rest() -> None:
    x = torch.arange(12.0).view(1, 2, 6)
    cos, sin = torch.tensor([[0.5, 1.0]]), torch.tensor([[0.25, 0.0]])
    found = ReferenceOps().rope(x, cos, sin)
    assert found[0, 0].tolist() == [0 * 0.5 - 2 * 0.25, 1.0, 2 * 0.5 + 0 * 0.25, 3.0, 4.0, 5.0]
    assert found[0, 1, 4:].tolist() == [10.0, 11.0]
