"""How one weight is stored in a checkpoint: plain, FP8, or NVFP4 as either common tool writes it.

Lives in ``checkpoint`` because suffixes and scale conventions belong to the publishers' files. ``find_stored``
looks only at names, types, and shapes; ``StoredWeight`` reads. It must not know which family a name belongs to.

Conventions (multiplier: what the decoded value is multiplied with):
- compressed-tensors ``nvfp4-pack-quantized``: weight_packed, weight_scale, weight_global_scale (1 / multiplier).
- ModelOpt NVFP4: weight (bytes), weight_scale, weight_scale_2 (multiplier).
- FP8: weight (F8_E4M3) with weight_scale (multiplier: one, one a row) or weight_scale_inv (multiplier a block).
Scales of activations and of the KV cache may be present; the engine has its own and does not use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from strata.checkpoint.safetensors_header import TensorSpec
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.errors import CheckpointError
from strata.quant.blocks import BLOCK_WIDTH, QuantisedMatrix, check_scales, dequantise

__all__ = ["KNOWN_SUFFIXES", "StoredWeight", "decode", "find_stored", "is_finite"]

StoredForm = Literal["plain", "fp8", "nvfp4"]

UNUSED_SUFFIXES = ("input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale")
KNOWN_SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_scale_inv",
    *UNUSED_SUFFIXES,
)
FP8_BLOCK = 128  # rows and columns under one scale of weight_scale_inv, unless the config says otherwise
NVFP4_BLOCK = BLOCK_WIDTH["nvfp4"]
_PLAIN_TYPES = {"BF16", "F16", "F32"}
_INTEGER_TYPES = {"I64", "I32"}


@dataclass(frozen=True)
class StoredWeight:
    """One weight of the map as it lies in the files. ``shape`` is that of the decoded weight."""

    name: str
    form: StoredForm
    shape: tuple[int, ...]
    dtype: str
    data: str
    scale: str | None = None
    tensor_scale: str | None = None
    reciprocal: bool = False
    block_scaled: bool = False
    unused: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that belongs to this weight, the unused scales included."""
        return tuple(name for name in (self.data, self.scale, self.tensor_scale) if name) + self.unused

    def read(self, checkpoint: Checkpoint, start: int = 0, stop: int | None = None) -> torch.Tensor | QuantisedMatrix:
        """Rows ``start`` to ``stop`` of axis 0. Plain weights keep their type; FP8 becomes FP32; NVFP4 stays packed.

        Raises ``CheckpointError`` if a value or a scale is not finite, or a tensor scale is not positive.
        """
        where = f"{checkpoint.folder}: {self.name}"
        data = checkpoint.read(self.data, start, stop)
        if self.form == "plain":
            if data.is_floating_point() and not is_finite(data):
                raise CheckpointError(f"{where} holds values that are not finite", "fetch the file again")
            return data
        assert self.scale is not None
        if self.form == "nvfp4":
            return self._read_nvfp4(checkpoint, data, start, stop, where)
        _refuse_nan_codes(data, where)
        return data.float() * self._read_fp8_scales(checkpoint, data, start, stop, where)

    def read_fp8_rows(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start`` to ``stop`` as FP8 codes, and the FP32 scale of each row. Not for block-scaled weights."""
        assert self.form == "fp8"
        assert not self.block_scaled
        where = f"{checkpoint.folder}: {self.name}"
        codes = checkpoint.read(self.data, start, stop)
        _refuse_nan_codes(codes, where)
        scales = self._read_fp8_scales(checkpoint, codes, start, stop, where)
        return codes, scales.reshape(-1).expand(stop - start).contiguous()

    def _read_nvfp4(
        self, checkpoint: Checkpoint, codes: torch.Tensor, start: int, stop: int | None, where: str
    ) -> QuantisedMatrix:
        assert self.scale is not None
        assert self.tensor_scale is not None
        scales = checkpoint.read(self.scale, start, stop).view(torch.uint8)
        scales = torch.where(scales == 0x80, 0, scales)  # a negative zero is a zero
        whole = checkpoint.read(self.tensor_scale).float().reshape(-1)
        if len(self.shape) == 3:
            whole = whole.expand(self.shape[0])[start:stop]
        else:
            whole = whole[0]
        # A reciprocal of zero or infinity is infinity or zero, so the check below sees both.
        multiplier = (1.0 / whole if self.reciprocal else whole).contiguous()
        matrix = QuantisedMatrix("nvfp4", self.shape[-1], codes.view(torch.uint8), scales, multiplier)
        check_scales(matrix, where)
        return matrix

    def _read_fp8_scales(
        self, checkpoint: Checkpoint, values: torch.Tensor, start: int, stop: int | None, where: str
    ) -> torch.Tensor:
        assert self.scale is not None
        scales = checkpoint.read(self.scale).float()
        bad = scales[~(torch.isfinite(scales) & (scales > 0))]
        if bad.numel():
            raise CheckpointError(
                f"{where}: scale {self.scale} holds {bad[0].item()}, needed is a finite number above zero",
                "fetch the file again",
            )
        if scales.numel() == 1:
            return scales.reshape(1)
        if not self.block_scaled:
            return scales.reshape(-1, 1)[start:stop]
        rows = torch.arange(start, start + values.shape[0]) // _block(checkpoint)[0]
        columns = torch.arange(values.shape[1]) // _block(checkpoint)[1]
        return scales[rows][:, columns]


def is_finite(data: torch.Tensor) -> bool:
    """Whether all values are; by the exponent bits of 16-bit types, which is 20 times as fast as torch.isfinite."""
    if data.numel() == 0:
        return True
    if data.dtype == torch.float32:
        low, high = torch.aminmax(data)  # a NaN reaches both
        return math.isfinite(low.item()) and math.isfinite(high.item())
    infinity = 0x7F80 if data.dtype == torch.bfloat16 else 0x7C00
    return int((data.view(torch.int16) & 0x7FFF).amax()) < infinity


def _refuse_nan_codes(codes: torch.Tensor, where: str) -> None:
    if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise CheckpointError(f"{where} holds FP8 codes that are not numbers", "fetch the file again")


def decode(weight: torch.Tensor | QuantisedMatrix) -> torch.Tensor:
    """The weight as a plain tensor: NVFP4 becomes FP32, anything else stays."""
    return dequantise(weight) if isinstance(weight, QuantisedMatrix) else weight


def _block(checkpoint: Checkpoint) -> tuple[int, int]:
    quantisation = checkpoint.config.get("quantization_config")
    size = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    if isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size):
        return size[0], size[1]
    return FP8_BLOCK, FP8_BLOCK


def find_stored(checkpoint: Checkpoint, name: str) -> StoredWeight | None:
    """The weight that the map calls ``name`` (with or without a final ``.weight``), or None if nothing is there.

    Raises ``CheckpointError`` when a part is there and its scales are not, or they do not fit its shape.
    """
    specs = checkpoint.specs
    base = name.removesuffix(".weight")
    where = f"{checkpoint.folder}: {name}"
    plain, packed = specs.get(name), _with_suffix(specs, base, "weight_packed")
    if plain is not None and packed is not None:
        raise CheckpointError(f"{where} is stored twice: {plain.name} and {packed.name}")
    if packed is not None:
        return _find_nvfp4(checkpoint, name, packed, "weight_global_scale")
    if plain is None:
        return None
    if plain.dtype in _PLAIN_TYPES or plain.dtype in _INTEGER_TYPES:
        return StoredWeight(name, "plain", plain.shape, plain.dtype, plain.name, unused=_find_unused(specs, base))
    if plain.dtype == "U8":
        return _find_nvfp4(checkpoint, name, plain, "weight_scale_2")
    if plain.dtype == "F8_E4M3":
        return _find_fp8(checkpoint, name, plain)
    raise CheckpointError(f"{where} is of type {plain.dtype}, which is not read", "read are BF16, F16, F32, FP8, NVFP4")


def _with_suffix(specs: Mapping[str, TensorSpec], base: str, suffix: str) -> TensorSpec | None:
    return specs.get(f"{base}.{suffix}") or specs.get(f"{base}_{suffix}")


def _list_of(specs: Mapping[str, TensorSpec], base: str) -> str:
    return ", ".join(sorted(other for other in specs if other.startswith((f"{base}.", f"{base}_"))))


def _find_unused(specs: Mapping[str, TensorSpec], base: str) -> tuple[str, ...]:
    return tuple(spec.name for suffix in UNUSED_SUFFIXES if (spec := _with_suffix(specs, base, suffix)))


def _find_nvfp4(checkpoint: Checkpoint, name: str, data: TensorSpec, tensor_scale_suffix: str) -> StoredWeight:
    specs, base, where = checkpoint.specs, name.removesuffix(".weight"), f"{checkpoint.folder}: {name}"
    scale = _with_suffix(specs, base, "weight_scale")
    tensor_scale = _with_suffix(specs, base, tensor_scale_suffix)
    if scale is None or tensor_scale is None:
        missing = "weight_scale" if scale is None else tensor_scale_suffix
        raise CheckpointError(f"{where} is packed in 4 bits but has no {missing} (found {_list_of(specs, base)})")
    shape = (*data.shape[:-1], 2 * data.shape[-1])
    if data.dtype != "U8" or len(shape) not in (2, 3) or shape[-1] % NVFP4_BLOCK:
        raise CheckpointError(f"{where}: {data.name} of type {data.dtype} and shape {list(data.shape)} is not NVFP4")
    expected = (*data.shape[:-1], shape[-1] // NVFP4_BLOCK)
    if scale.dtype not in ("F8_E4M3", "U8") or scale.shape != expected:
        raise CheckpointError(
            f"{where}: {scale.name} is {scale.dtype} {list(scale.shape)}, needed is F8_E4M3 {list(expected)}"
        )
    counts = {1} if len(shape) == 2 else {1, shape[0]}
    if tensor_scale.count not in counts or tensor_scale.dtype not in _PLAIN_TYPES:
        raise CheckpointError(f"{where}: {tensor_scale.name} has {tensor_scale.count} values, one is needed")
    return StoredWeight(
        name,
        "nvfp4",
        shape,
        "NVFP4",
        data.name,
        scale.name,
        tensor_scale.name,
        reciprocal=tensor_scale_suffix == "weight_global_scale",
        unused=_find_unused(specs, base),
    )


def _find_fp8(checkpoint: Checkpoint, name: str, data: TensorSpec) -> StoredWeight:
    specs, base, where = checkpoint.specs, name.removesuffix(".weight"), f"{checkpoint.folder}: {name}"
    scale, inverse = _with_suffix(specs, base, "weight_scale"), _with_suffix(specs, base, "weight_scale_inv")
    found = scale or inverse
    if found is None or (scale and inverse) or len(data.shape) != 2:
        raise CheckpointError(f"{where} is FP8 and needs one scale tensor (found {_list_of(specs, base)})")
    rows, columns = data.shape
    block_rows, block_columns = _block(checkpoint)
    blocks = (math.ceil(rows / block_rows), math.ceil(columns / block_columns))
    one_a_row = found.shape in ((rows,), (rows, 1))
    if found.dtype not in _PLAIN_TYPES or not (one_a_row or found.count == 1 or found.shape == blocks):
        raise CheckpointError(
            f"{where}: {found.name} is {found.dtype} {list(found.shape)}, needed is one scale, {rows} or {list(blocks)}"
        )
    return StoredWeight(
        name,
        "fp8",
        data.shape,
        "F8_E4M3",
        data.name,
        found.name,
        block_scaled=found.count > 1 and not one_a_row,
        unused=_find_unused(specs, base),
    )
