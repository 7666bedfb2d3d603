"""The block formats that expert weights are kept in: quantise, dequantise and check, in plain torch.

Lives in ``quant`` because a format is arithmetic on numbers and nothing else. These are the reference that kernels
are tested against and what the pack writer calls; all functions take any leading axes, so that many experts are
one call. It must not know how a blob is laid out, which model the weights come from, or where they will lie.

Legend: R output rows, K input weights of a row, B blocks of a row.

- ``nvfp4``: 4-bit E2M1 codes, an E4M3 scale per 16 weights, an FP32 scale per matrix: weight = code * scale *
  tensor_scale. Codes are packed two to a byte, the even index in the low nibble, as checkpoints have them.
- ``q8_0``: signed 8-bit codes in [-128, 127], an FP16 scale per 32 weights: weight = code * scale.
- ``bf16``: the weights themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from strata.errors import CheckpointError, ConfigError

__all__ = [
    "BLOCK_WIDTH",
    "E2M1_VALUES",
    "LARGEST_PRODUCT",
    "ExpertFormat",
    "QuantisedMatrix",
    "check_scales",
    "dequantise",
    "e4m3_values",
    "quantise",
]

ExpertFormat = Literal["nvfp4", "q8_0", "bf16"]
BLOCK_WIDTH: dict[str, int] = {"nvfp4": 16, "q8_0": 32, "bf16": 1}
"""Weights that share a scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; bit 3 is the sign."""

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_E4M3_NAN = 0x7F

LARGEST_PRODUCT: dict[str, float] = {
    "nvfp4": _E2M1_MAX * _E4M3_MAX,
    "q8_0": 128 * torch.finfo(torch.float16).max,
    "bf16": torch.finfo(torch.bfloat16).max,
}
"""The largest code times the largest block scale of a format: a weight is at most this times its tensor scale."""


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """Weights of shape ``[..., R, K]`` in one format. Tensors are contiguous and owned by whoever made this.

    ``codes``: nvfp4 uint8 ``[..., R, ceil(K/2)]``; q8_0 int8 ``[..., R, K]``; bf16 bfloat16 ``[..., R, K]``.
    ``scales``: nvfp4 uint8 (E4M3 bits) ``[..., R, ceil(K/16)]``; q8_0 float16 ``[..., R, ceil(K/32)]``; bf16 None.
    ``tensor_scale``: FP32 of the leading axes (ones where the format has none).
    """

    format: ExpertFormat
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    tensor_scale: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.codes.shape[-2])


def e4m3_values() -> torch.Tensor:
    """FP32 values of the 256 E4M3 codes; 0x7F and 0xFF are NaN."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def check_format(name: str) -> ExpertFormat:
    """``name`` as a format. Raises ``ConfigError`` that lists the formats there are."""
    for known in get_args(ExpertFormat):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"expert format {name!r} is not known", f"use one of {', '.join(get_args(ExpertFormat))}")


def _split_blocks(weights: torch.Tensor, width: int) -> torch.Tensor:
    """FP32 ``[..., B, width]``, the last block padded with zeros."""
    missing = -weights.shape[-1] % width
    padded = torch.nn.functional.pad(weights.float(), (0, missing)) if missing else weights.float()
    return padded.reshape(*weights.shape[:-1], -1, width)


def quantise(weights: torch.Tensor, format: ExpertFormat) -> QuantisedMatrix:
    """Rounds ``weights`` ``[..., R, K]`` (any float type) to ``format``.

    A partial last block is padded with zeros. Raises ``CheckpointError`` if a weight is not finite.
    """
    check_format(format)
    if not bool(torch.isfinite(weights).all()):
        raise CheckpointError("a weight to be quantised is not finite", "the checkpoint is damaged; fetch it again")
    if format == "nvfp4":
        return _quantise_nvfp4(weights)
    if format == "q8_0":
        return _quantise_q8_0(weights)
    ones = torch.ones(weights.shape[:-2], dtype=torch.float32)
    return QuantisedMatrix("bf16", int(weights.shape[-1]), weights.to(torch.bfloat16).contiguous(), None, ones)


def _quantise_nvfp4(weights: torch.Tensor) -> QuantisedMatrix:
    columns = int(weights.shape[-1])
    blocks = _split_blocks(weights, 16)
    largest = blocks.abs().amax(-1)
    of_tensor = largest.amax((-2, -1))
    tensor_scale = torch.where(of_tensor > 0, of_tensor / (_E2M1_MAX * _E4M3_MAX), torch.ones_like(of_tensor))
    # A matrix of subnormal weights would get a scale of zero: the smallest normal number serves it as well.
    tensor_scale = tensor_scale.clamp_min(torch.finfo(torch.float32).tiny)
    wanted = largest / (_E2M1_MAX * tensor_scale[..., None, None])
    scales = wanted.clamp_max(_E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.float() * tensor_scale[..., None, None]
    magnitude = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))[..., None] * blocks.abs()
    # Nearest E2M1 value, ties to the even code.
    codes = (magnitude > 0.25).to(torch.uint8)
    for edge, at_tie in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        codes += (magnitude >= edge) if at_tie else (magnitude > edge)
    codes |= (blocks < 0).to(torch.uint8) << 3
    flat = codes.flatten(-2)[..., : columns + columns % 2]
    packed = flat[..., 0::2] | (flat[..., 1::2] << 4)
    return QuantisedMatrix("nvfp4", columns, packed.contiguous(), scales.view(torch.uint8).contiguous(), tensor_scale)


def _quantise_q8_0(weights: torch.Tensor) -> QuantisedMatrix:
    columns = int(weights.shape[-1])
    blocks = _split_blocks(weights, 32)
    scales = (blocks.abs().amax(-1) / 127.0).clamp_max(torch.finfo(torch.float16).max).to(torch.float16)
    step = scales.float()[..., None]
    codes = torch.where(step > 0, blocks / step, torch.zeros_like(blocks)).round().clamp(-127, 127).to(torch.int8)
    ones = torch.ones(weights.shape[:-2], dtype=torch.float32)
    return QuantisedMatrix("q8_0", columns, codes.flatten(-2)[..., :columns].contiguous(), scales, ones)


def dequantise(matrix: QuantisedMatrix) -> torch.Tensor:
    """The weights that the codes stand for, FP32 ``[..., R, K]``, each product rounded once per factor."""
    if matrix.format == "bf16":
        return matrix.codes.float()
    assert matrix.scales is not None
    if matrix.format == "q8_0":
        spread = matrix.scales.float().repeat_interleave(32, -1)[..., : matrix.columns]
        return matrix.codes.float() * spread
    signed = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    low, high = matrix.codes & 0xF, matrix.codes >> 4
    values = signed[torch.stack((low, high), -1).flatten(-2)[..., : matrix.columns].int()]
    spread = e4m3_values()[matrix.scales.int()].repeat_interleave(16, -1)[..., : matrix.columns]
    return values * spread * matrix.tensor_scale[..., None, None]


def check_scales(matrix: QuantisedMatrix, name: str) -> None:
    """Refuses scales that no arithmetic is defined for: NaN, infinite, negative E4M3, a tensor scale not above 0.

    A zero block scale is defined (the block is zero). ``name`` is the tensor named in the ``CheckpointError``.
    """
    hint = "the checkpoint is damaged or of another layout; fetch it again"
    finite = torch.isfinite(matrix.tensor_scale) & (matrix.tensor_scale > 0)
    if not bool(finite.all()):
        raise CheckpointError(f"{name}: a tensor scale is not finite and above zero", hint)
    if matrix.format == "nvfp4":
        assert matrix.scales is not None
        bad = int((matrix.scales >= _E4M3_NAN).sum())
        if bad:
            raise CheckpointError(f"{name}: {bad} block scales are NaN or negative (E4M3 code 0x7F or above)", hint)
    elif matrix.format == "q8_0":
        assert matrix.scales is not None
        bad = int((~torch.isfinite(matrix.scales)).sum())
        if bad:
            raise CheckpointError(f"{name}: {bad} block scales are not finite", hint)
