"""Block formats against definitions written out here: values, rounding, special blocks, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import CheckpointError, ConfigError
from strata.quant import ExpertFormat, QuantisedMatrix, dequantise, quantise
from strata.quant.blocks import E2M1_VALUES, check_scales, e4m3_values

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "q8_0", "bf16")


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if code & 0x80 else size


def test_e4m3_table_is_the_definition() -> None:
    expected = [e4m3(code) for code in range(256)]
    assert np.array_equal(e4m3_values().numpy(), np.array(expected, np.float32), equal_nan=True)


def test_nvfp4_codes_stand_for_code_times_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)  # all pairs, 32 weights a row
    scales = torch.arange(32, dtype=torch.uint8).view(1, 16, 2) * 3
    matrix = QuantisedMatrix("nvfp4", 32, codes, scales, torch.tensor([0.375]))
    values = dequantise(matrix)[0]
    for row in range(16):
        for column in range(32):
            byte = int(codes[0, row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            sign = -1.0 if code & 8 else 1.0
            expected = sign * E2M1_VALUES[code & 7] * e4m3(int(scales[0, row, column // 16])) * 0.375
            assert values[row, column].item() == np.float32(expected)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-6, 6, width=32), min_size=15, max_size=15))
def test_nvfp4_rounds_to_the_nearest_value_and_ties_to_the_even_code(numbers: list[float]) -> None:
    weights = torch.tensor([[[6.0, *numbers]]])
    matrix = quantise(weights, "nvfp4")
    # The largest weight is 6 = 6 * 448 * (1/448): the block's scale is 448 and the step is 448 * tensor scale.
    step = 448.0 * matrix.tensor_scale.item()
    for number, found in zip(numbers, dequantise(matrix)[0, 0, 1:].tolist(), strict=True):
        errors = [abs(abs(number) / step - value) for value in E2M1_VALUES]
        distance = abs(abs(number) / step - abs(found) / step)
        assert distance <= min(errors) + 1e-5
        if found:
            assert (found < 0) == (number < 0)


def test_nvfp4_ties() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    weights = torch.tensor([[[6.0, *ties, *(-tie for tie in ties), 0.0]]]) * 448  # tensor scale exactly 1
    found = (dequantise(quantise(weights, "nvfp4")) / 448)[0, 0].tolist()
    assert found[1:8] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert found[8:15] == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


@pytest.mark.parametrize("format", FORMATS)
def test_error_is_that_of_the_format(format: ExpertFormat) -> None:
    weights = torch.randn(4, 64, 256, generator=torch.Generator().manual_seed(1))
    error = ((dequantise(quantise(weights, format)) - weights).norm() / weights.norm()).item()
    low, high = {"nvfp4": (0.08, 0.11), "q8_0": (0.004, 0.007), "bf16": (0.0014, 0.002)}[format]
    assert low < error < high


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, -1e-30, 1e-40])
def test_blocks_that_are_all_equal(format: ExpertFormat, value: float) -> None:
    weights = torch.full((2, 3, 64), value)
    matrix = quantise(weights, format)
    check_scales(matrix, "w")
    found = dequantise(matrix)
    assert torch.isfinite(found).all()
    if value in (0.0, 3.0):
        assert torch.allclose(found, weights, rtol=0.005)


def test_one_outlier_does_not_touch_other_blocks() -> None:
    weights = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(2))
    weights[0, 0, 20] = 1000.0
    found = dequantise(quantise(weights, "q8_0"))
    assert torch.allclose(found[0, 0, 32:], weights[0, 0, 32:], atol=0.02)
    assert abs(found[0, 0, 20].item() - 1000) < 1


def test_leading_axes_are_many_matrices() -> None:
    weights = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(3))
    for format in FORMATS:
        together = quantise(weights, format)
        for i in range(2):
            for j in range(3):
                assert torch.equal(dequantise(together)[i, j], dequantise(quantise(weights[i, j], format)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_are_not_finite_are_refused(format: ExpertFormat, bad: float) -> None:
    weights = torch.zeros(1, 2, 32)
    weights[0, 1, 5] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        quantise(weights, format)


@pytest.mark.parametrize("code", [0x7F, 0x80, 0xB0, 0xFF])
def test_e4m3_scales_without_meaning_are_refused(code: int) -> None:
    matrix = quantise(torch.ones(1, 2, 32), "nvfp4")
    assert matrix.scales is not None
    matrix.scales[0, 1, 1] = code
    with pytest.raises(CheckpointError, match="1 block scales"):
        check_scales(matrix, "w")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_tensor_scales_without_meaning_are_refused(scale: float) -> None:
    matrix = quantise(torch.ones(1, 2, 32), "nvfp4")
    matrix.tensor_scale[0] = scale
    with pytest.raises(CheckpointError, match="tensor scale"):
        check_scales(matrix, "w")


def test_fp16_scales_that_are_not_finite_are_refused() -> None:
    matrix = quantise(torch.ones(1, 2, 32), "q8_0")
    assert matrix.scales is not None
    matrix.scales[0, 0, 0] = math.inf
    with pytest.raises(CheckpointError, match="not finite"):
        check_scales(matrix, "w")


def test_an_unknown_format_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="nvfp4, q8_0, bf16"):
        quantise(torch.ones(1, 1), "q4_k")  # type: ignore[arg-type]
