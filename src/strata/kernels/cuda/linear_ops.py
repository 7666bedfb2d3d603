"""Products with dense weights and the embedding, recorded: launches of linear.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.recorder import Recorder, agree
from strata.kernels.ops import Matrix

__all__ = ["FORMATS", "LinearOps", "NativeMatrix", "template_rows"]

FORMATS = {"f32": 0, "bf16": 1, "q8_0": 2}
MOST_MATRICES = 8
ROWS_OF_WARP = {1: 2, 2: 2, 4: 4, 8: 4}  # R of linear.cu's kernels, by T
THREADS = 256
STEP_COLUMNS = 512  # columns of whole steps in every format
MOST_BLOCKS = 4  # of a multiprocessor
_SOURCES = {"sigmoid": 2, "silu": 1}


class NativeMatrix(ctypes.Structure):
    """``Matrix`` of linear.h."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "row_bytes", "format", "first", "is_aligned", "unused")),
    )


class _Matrices(ctypes.Structure):
    _fields_ = (
        ("of", NativeMatrix * MOST_MATRICES),
        *((name, ctypes.c_int) for name in ("count", "groups", "columns", "chunk")),
    )


def template_rows(rows: int) -> int:
    """The kernel that serves ``rows`` rows: the next of 1, 2, 4, 8. A row's arithmetic is the same in all."""
    return next(size for size in (1, 2, 4, MAX_WINDOW) if rows <= size)


class LinearOps(Recorder):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def embedding(self, ids: Sequence[int], table_VH: Matrix) -> torch.Tensor:
        """Of ``ids`` only the number is looked at: the tokens are ``RoundInputs.ids``. A table that does not lie on the
        device is read where it is pinned."""
        rows = len(ids)
        if not 1 <= rows <= MAX_WINDOW:
            raise EngineError(f"a recorded round of {rows} rows: 1 to {MAX_WINDOW} are recorded")
        table = self.matrix(table_VH)
        y_TH = self.empty(rows, table_VH.columns)
        self.program.launch(
            "linear.embedding", (rows,), THREADS, self.inputs, self.pointer(table.data), self.pointer(table.scales),
            table.format, table.rows, table_VH.columns, table.row_bytes, y_TH,
        )  # fmt: skip
        return y_TH

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        return self.linears(x_TI, [weight_OI])[0]

    def linears(self, x_TI: torch.Tensor, weights: Sequence[Matrix]) -> list[torch.Tensor]:
        return self._products(x_TI, None, weights, 0)

    def gated_linear(
        self, gate_TI: torch.Tensor, x_TI: torch.Tensor, weight_OI: Matrix, kind: Literal["sigmoid", "silu"]
    ) -> torch.Tensor:
        agree("gated_linear shapes", gate_TI.shape, x_TI.shape)
        return self._products(x_TI, gate_TI, [weight_OI], _SOURCES[kind])[0]

    def swiglu(self, x_TH: torch.Tensor, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> torch.Tensor:
        gate_TI, up_TI = self.linears(x_TH, [gate_IH, up_IH])
        return self.gated_linear(gate_TI, up_TI, down_HI, "silu")

    def matrix(self, weight: Matrix, slices: int = 1) -> NativeMatrix:
        """``slices``: the columns are read in so many equal parts, each from its own start."""
        data = weight.data
        if not data.is_contiguous() or weight.format not in FORMATS:
            raise EngineError(f"a matrix of format {weight.format} with strides {tuple(data.stride())}")
        row_bytes = int(data.shape[1]) * data.element_size()
        part = row_bytes // slices
        if weight.format == "q8_0":
            assert weight.scales is not None
            agree("q8_0 scales", tuple(weight.scales.shape), (weight.rows, data.shape[1] // 32))
            if part * slices != row_bytes or part % 16 or data.data_ptr() % 16:
                raise EngineError(f"q8_0 rows of {row_bytes} weights are not read in {slices} parts")
        agree("columns of a matrix", -(-weight.columns // 32) * 32 if weight.format == "q8_0" else weight.columns,
              data.shape[1])  # fmt: skip
        return NativeMatrix(
            data=self.address(data),
            scales=self.address(weight.scales),
            rows=weight.rows,
            row_bytes=row_bytes,
            format=FORMATS[weight.format],
            is_aligned=int(row_bytes % 16 == 0 and part % 16 == 0 and data.data_ptr() % 16 == 0),
        )

    def _products(
        self, x_TI: torch.Tensor, gate_TI: torch.Tensor | None, weights: Sequence[Matrix], source: int
    ) -> list[torch.Tensor]:
        columns = int(x_TI.shape[-1])
        x_RI = x_TI.reshape(-1, columns)
        outputs = [self.empty(*x_TI.shape[:-1], weight.rows) for weight in weights]
        for first in range(0, x_RI.shape[0], MAX_WINDOW):  # more rows than a window: streams of one
            for cut in range(0, len(weights), MOST_MATRICES):
                rows = slice(first, first + MAX_WINDOW)
                self._launch_products(
                    x_RI[rows],
                    None if gate_TI is None else gate_TI.reshape(-1, columns)[rows],
                    weights[cut : cut + MOST_MATRICES],
                    [y.view(x_RI.shape[0], -1)[rows] for y in outputs[cut : cut + MOST_MATRICES]],
                    source,
                )
        return outputs

    def _launch_products(
        self,
        x_TI: torch.Tensor,
        gate_TI: torch.Tensor | None,
        weights: Sequence[Matrix],
        outputs: list[torch.Tensor],
        source: int,
    ) -> None:
        rows, columns = self.rows_of(x_TI), int(x_TI.shape[1])
        template = template_rows(rows)
        of_warp = ROWS_OF_WARP[template]
        room = max(1, self.shared_bytes // (4 * STEP_COLUMNS * template))
        chunk = STEP_COLUMNS * min(room, -(-columns // STEP_COLUMNS))
        all_of = _Matrices(count=len(weights), columns=columns, chunk=chunk)
        groups = 0
        for place, (weight, y) in enumerate(zip(weights, outputs, strict=True)):
            agree("linear columns", columns, weight.columns)
            native = self.matrix(weight)
            native.y, native.first = self.address(y), groups
            all_of.of[place] = native
            groups += -(-weight.rows // of_warp)
        all_of.groups = groups
        gate = x_TI if gate_TI is None else gate_TI
        self.program.launch(
            f"linear.linears_{template}", (self._blocks(groups),), THREADS, x_TI, gate, source, rows, all_of,
            shared=4 * chunk * template,
        )  # fmt: skip

    def _blocks(self, groups: int) -> int:
        """Blocks so that the busiest multiprocessor has the least to do; no bit depends on it."""
        processors, warps = self.program.multiprocessors, THREADS // 32
        share = -(-groups // processors)
        best = min(range(1, MOST_BLOCKS + 1), key=lambda blocks: (-(-share // (blocks * warps)) * blocks, -blocks))
        return min(-(-groups // warps), processors * best)
