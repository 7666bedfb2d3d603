"""Native quantising and packing against the reference of ``strata.quant``, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import CheckpointError
from strata.kernels.cpu import packing
from strata.quant import ExpertFormat, ExpertLayout, QuantisedMatrix, quantise

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "q8_0", "bf16")


def same(a: QuantisedMatrix, b: QuantisedMatrix) -> bool:
    scales = (a.scales is None and b.scales is None) or (
        a.scales is not None and b.scales is not None and torch.equal(a.scales, b.scales)
    )
    return (
        (a.format, a.columns) == (b.format, b.columns)
        and torch.equal(a.codes, b.codes)
        and scales
        and torch.equal(a.tensor_scale, b.tensor_scale)
    )


def awkward(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random weights with wide exponents, zeros, -0, subnormals and an outlier."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(shape, generator=random) * 2.0 ** torch.randint(-30, 3, shape, generator=random)
    flat = weights.view(-1)
    flat[::7] = 0.0
    flat[3::11] = -0.0
    flat[5::13] = 1e-41
    flat[len(flat) // 2] = 300.0
    return weights


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), columns=st.integers(1, 100), seed=st.integers(0, 999))
def test_quantise(format: ExpertFormat, kind: torch.dtype, rows: int, columns: int, seed: int) -> None:
    weights = awkward((2, rows, columns), seed).to(kind)
    assert same(packing.quantise(weights, format), quantise(weights, format))


@pytest.mark.parametrize("format", ["nvfp4", "q8_0"])
def test_matrices_of_one_value_and_ties(format: ExpertFormat) -> None:
    for value in (0.0, -0.0, 1.0, -3e38, 1e-38, 1e-45):
        weights = torch.full((1, 3, 64), value)
        assert same(packing.quantise(weights, format), quantise(weights, format)), value
    steps = torch.arange(-512, 512).float().view(1, 16, 64) / 64
    assert same(packing.quantise(steps, format), quantise(steps, format))


def test_every_e4m3_neighbourhood() -> None:
    """Blocks whose wanted scales are all codes and all midpoints between them."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    wanted = torch.cat([values, middle, middle * (1 + 2.0**-20), middle * (1 - 2.0**-20), values[-1:]])
    blocks = torch.zeros(1, len(wanted), 16)
    blocks[0, :, 3] = wanted * 6.0
    assert same(packing.quantise(blocks, "nvfp4"), quantise(blocks, "nvfp4"))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 150), st.integers(1, 150), st.sampled_from(FORMATS))
def test_pack(hidden: int, inner: int, format: ExpertFormat) -> None:
    layout = ExpertLayout(hidden, inner, format)
    shapes = ((3, inner, hidden), (3, inner, hidden), (3, hidden, inner))
    weights = [awkward(shape, seed) for seed, shape in enumerate(shapes)]
    for one, other in zip(packing.pack_weights(layout, *weights), layout.pack_weights(*weights), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("format", ["nvfp4", "q8_0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(format: ExpertFormat, bad: float) -> None:
    weights = torch.ones(1, 20, 50)
    weights[0, 19, 49] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        packing.quantise(weights, format)
