"""Where each byte of a routed expert lies: the one layout that file, RAM, CPU kernels and GPU kernels share.

Lives in ``quant`` because it is a bijection between quantised matrices and bytes. It must not know which model an
expert belongs to, where blobs are kept, or how they are computed. The reasons and the alternatives that were
measured are decision record 0011.

A blob is whole pages. Rows are taken in groups of 16 and weights of a row in superblocks of 64; a superblock holds,
for each step of a few weights, 4 bytes of row 0, 4 bytes of row 1, ... of row 15 (one SIMD lane a row), then the
scales in the same order of rows:

    nvfp4    4 blocks x 2 halves x 16 rows x 4 bytes (8 codes), then 4 x 16 E4M3 bytes                =   576 bytes
    q8_0     16 steps x 16 rows x 4 codes,                      then 2 blocks x 16 rows FP16          = 1,088 bytes
    bf16     32 steps x 16 rows x 2 weights                                                           = 2,048 bytes

Groups follow one another: gate 0, up 0, gate 1, up 1, ..., then all of down. Rows are padded to 16 and weights of a
row to 64, with zeros. The three tensor scales lie in a table beside the blobs, so that an expert is nothing but pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from strata.errors import CheckpointError, ConfigError
from strata.quant.blocks import ExpertFormat, QuantisedMatrix, check_format, check_scales, dequantise, quantise

__all__ = ["GROUP_ROWS", "PAGE_BYTES", "SUPERBLOCK", "ExpertLayout"]

PAGE_BYTES = 4096
GROUP_ROWS = 16
SUPERBLOCK = 64

_CODE_BYTES: dict[str, int] = {"nvfp4": 512, "q8_0": 1024, "bf16": 2048}
_SCALE_BYTES: dict[str, int] = {"nvfp4": 64, "q8_0": 64, "bf16": 0}


def _split(tensor: torch.Tensor, axis: int, *sizes: int) -> torch.Tensor:
    """The view with one axis split into several; one size may be -1."""
    axis %= tensor.ndim
    return tensor.view(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ExpertLayout:
    """Layout of one expert: gate and up are ``intermediate x hidden``, down is ``hidden x intermediate``."""

    hidden: int
    intermediate: int
    format: ExpertFormat

    def __post_init__(self) -> None:
        check_format(self.format)
        for name, width in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if not 1 <= width <= 1 << 20:
                raise ConfigError(f"an expert's {name} width of {width} is out of range", "1 to 1,048,576 is read")

    @cached_property
    def superblock_bytes(self) -> int:
        """Bytes of 16 rows of 64 weights with their scales."""
        return _CODE_BYTES[self.format] + _SCALE_BYTES[self.format]

    @property
    def code_bytes(self) -> int:
        """Bytes of a superblock before its scales."""
        return _CODE_BYTES[self.format]

    @cached_property
    def down_offset(self) -> int:
        """First byte of the down matrix; gate and up, interleaved by groups, lie before it."""
        return 2 * self._matrix_bytes(self.intermediate, self.hidden)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes that kernels read."""
        return self.down_offset + self._matrix_bytes(self.hidden, self.intermediate)

    @cached_property
    def blob_bytes(self) -> int:
        """Bytes of a blob: the payload and zeros up to a whole page."""
        return _round_up(self.payload_bytes, PAGE_BYTES)

    def pack_weights(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantises and packs: gate, up ``[E, I, H]``, down ``[E, H, I]`` of any float type -> see ``pack``."""
        return self.pack(quantise(gate, self.format), quantise(up, self.format), quantise(down, self.format))

    def pack(
        self, gate: QuantisedMatrix, up: QuantisedMatrix, down: QuantisedMatrix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(blobs uint8 [E, blob_bytes], tensor_scales FP32 [E, 3])`` (gate, up, down), new tensors.

        Raises ``CheckpointError`` for shapes or scales that the layout does not take.
        """
        experts = self.check_matrices(gate, up, down)
        blobs = torch.zeros(experts, self.blob_bytes, dtype=torch.uint8)
        for place, matrix in zip(self._places(blobs), (gate, up, down), strict=True):
            self._fill(place, matrix)
        return blobs, torch.stack([matrix.tensor_scale.float() for matrix in (gate, up, down)], -1).contiguous()

    def unpack(
        self, blobs: torch.Tensor, tensor_scales: torch.Tensor
    ) -> tuple[QuantisedMatrix, QuantisedMatrix, QuantisedMatrix]:
        """The inverse of ``pack``: gate, up, down, as new tensors. ``blobs`` uint8 ``[E, blob_bytes]``."""
        if blobs.dtype != torch.uint8 or blobs.ndim != 2 or blobs.shape[1] != self.blob_bytes:
            raise CheckpointError(
                f"expert blobs of shape {tuple(blobs.shape)} do not fit {self.blob_bytes} bytes an expert",
                "the pack was written for another model or version; write it again with `strata pack`",
            )
        gate_place, up_place, down_place = self._places(blobs)
        return (
            self._read(gate_place, self.intermediate, self.hidden, tensor_scales[:, 0]),
            self._read(up_place, self.intermediate, self.hidden, tensor_scales[:, 1]),
            self._read(down_place, self.hidden, self.intermediate, tensor_scales[:, 2]),
        )

    def dequantise(
        self, blobs: torch.Tensor, tensor_scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """FP32 gate ``[E, I, H]``, up ``[E, I, H]``, down ``[E, H, I]`` of packed experts."""
        gate, up, down = self.unpack(blobs, tensor_scales)
        return dequantise(gate), dequantise(up), dequantise(down)

    def check(self, blobs: torch.Tensor, tensor_scales: torch.Tensor, name: str) -> None:
        """Refuses packed experts whose scales no arithmetic is defined for (a ``CheckpointError`` naming ``name``)."""
        for part, matrix in zip(("gate", "up", "down"), self.unpack(blobs, tensor_scales), strict=True):
            check_scales(matrix, f"{name} {part}")

    def check_matrices(self, gate: QuantisedMatrix, up: QuantisedMatrix, down: QuantisedMatrix) -> int:
        """The number of experts. Raises ``CheckpointError`` for matrices that are not this layout's."""
        wanted = {"gate": (self.intermediate, self.hidden), "up": (self.intermediate, self.hidden)}
        wanted["down"] = (self.hidden, self.intermediate)
        experts = int(gate.codes.shape[0])
        for (name, shape), matrix in zip(wanted.items(), (gate, up, down), strict=True):
            rows, columns = matrix.rows, matrix.columns
            if matrix.format != self.format or (rows, columns) != shape or matrix.codes.ndim != 3:
                raise CheckpointError(
                    f"expert {name} is {matrix.format} {rows} x {columns}, not {self.format} {shape[0]} x {shape[1]}"
                )
            if matrix.codes.shape[0] != experts or matrix.tensor_scale.shape != (experts,):
                raise CheckpointError(f"expert {name} holds {matrix.codes.shape[0]} experts, gate {experts}")
            check_scales(matrix, f"expert {name}")
        return experts

    def _matrix_bytes(self, rows: int, columns: int) -> int:
        groups = _round_up(rows, GROUP_ROWS) // GROUP_ROWS
        return groups * (_round_up(columns, SUPERBLOCK) // SUPERBLOCK) * self.superblock_bytes

    def _places(self, blobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views ``[E, groups, superblocks, superblock_bytes]`` of gate, up and down."""
        experts, size = blobs.shape[0], self.superblock_bytes
        wide = _round_up(self.hidden, SUPERBLOCK) // SUPERBLOCK
        narrow = _round_up(self.intermediate, SUPERBLOCK) // SUPERBLOCK
        pairs = blobs[:, : self.down_offset].view(experts, -1, 2, wide, size)
        down = blobs[:, self.down_offset : self.payload_bytes].view(experts, -1, narrow, size)
        return pairs[:, :, 0], pairs[:, :, 1], down

    def _steps(self, codes_bytes: torch.Tensor, row_bytes: int, rows: int) -> torch.Tensor:
        """Rows of codes as 32-bit words ``[E, groups, 16, superblocks, steps]``, padded with zeros.

        ``row_bytes`` is what a row of padded width holds; a view when nothing has to be padded.
        """
        missing = (0, row_bytes - codes_bytes.shape[-1], 0, -rows % GROUP_ROWS)
        padded = torch.nn.functional.pad(codes_bytes, missing) if any(missing) else codes_bytes.contiguous()
        words = padded.view(torch.int32)
        per_superblock = _CODE_BYTES[self.format] // (4 * GROUP_ROWS)
        return _split(_split(words, -1, -1, per_superblock), -3, -1, GROUP_ROWS)

    def _fill(self, place: torch.Tensor, matrix: QuantisedMatrix) -> None:
        code_bytes = _CODE_BYTES[self.format]
        superblocks = int(place.shape[2])
        row_bytes = superblocks * code_bytes // GROUP_ROWS
        steps = self._steps(matrix.codes.contiguous().view(torch.uint8), row_bytes, matrix.rows)
        target = _split(place[..., :code_bytes].view(torch.int32), -1, -1, GROUP_ROWS)
        target.copy_(steps.permute(0, 1, 3, 4, 2))
        if matrix.scales is None:
            return
        per_superblock = SUPERBLOCK // (16 if self.format == "nvfp4" else 32)
        scales = matrix.scales if self.format == "nvfp4" else matrix.scales.view(torch.int16)
        missing = (0, superblocks * per_superblock - scales.shape[-1], 0, -matrix.rows % GROUP_ROWS)
        padded = torch.nn.functional.pad(scales, missing) if any(missing) else scales
        by_group = _split(_split(padded, -1, superblocks, per_superblock), -3, -1, GROUP_ROWS)
        scale_place = _split(place[..., code_bytes:].view(scales.dtype), -1, -1, GROUP_ROWS)
        scale_place.copy_(by_group.permute(0, 1, 3, 4, 2))

    def _read(self, place: torch.Tensor, rows: int, columns: int, tensor_scale: torch.Tensor) -> QuantisedMatrix:
        code_bytes = _CODE_BYTES[self.format]
        words = _split(place[..., :code_bytes].view(torch.int32), -1, -1, GROUP_ROWS)
        by_row = words.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2).contiguous()
        scale = tensor_scale.float().clone()
        if self.format == "bf16":
            weights = by_row.view(torch.bfloat16)[:, :rows, :columns]
            return QuantisedMatrix("bf16", columns, weights.contiguous(), None, scale)
        scale_type = torch.uint8 if self.format == "nvfp4" else torch.float16
        scales = _split(place[..., code_bytes:].view(scale_type), -1, -1, GROUP_ROWS)
        width = 16 if self.format == "nvfp4" else 32
        scales = scales.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2)[:, :rows, : -(-columns // width)].contiguous()
        if self.format == "nvfp4":
            codes = by_row.view(torch.uint8)[:, :rows, : -(-columns // 2)]
        else:
            codes = by_row.view(torch.int8)[:, :rows, :columns]
        return QuantisedMatrix(self.format, columns, codes.contiguous(), scales, scale)
