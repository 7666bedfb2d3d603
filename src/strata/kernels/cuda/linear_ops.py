"""Products with dense weights and the embedding, recorded: launches of linear.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.recorder import Recorder, agree, blocks_of
from strata.kernels.ops import Matrix

__all__ = [
    "FORMATS",
    "NORM_WIDTH",
    "STEP_COLUMNS",
    "Activations",
    "LinearOps",
    "NativeMatrix",
    "ProductPart",
    "forms_of",
    "staged_bytes",
    "template_rows",
]

FORMATS = {"f32": 0, "bf16": 1, "q8_0": 2}
MOST_MATRICES = 8
THREADS = 256
NARROW_WARPS = 10  # at most, of a block whose warps take one row of weights each
STEP_COLUMNS = 512  # columns of whole steps in every format
NORM_WIDTH = 128  # columns of heads whose gated norm a product does while it reads
RESIDENT_BLOCKS = {1: 2, 2: 2, 4: 1, 8: 1}  # that a multiprocessor has registers for, by T
FLOATS, CODES = 1, 2  # Forms of linear.h
AHEAD_BYTES, MOST_CARRYING = 8 << 20, 20 << 20  # what a product brings of later weights, if its own are fewer than that
_SOURCES = {"plain": 0, "silu": 1, "sigmoid": 2, "norm sigmoid": 3, "norm silu": 4}  # Source of linear.cu


@dataclass(frozen=True, eq=False)
class Activations:
    """What a product reads: ``x_RI`` by itself, or with a gate (a view of its shape, rows x heads x width), or the
    gated norm of heads of ``NORM_WIDTH`` columns."""

    x_RI: torch.Tensor
    source: str = "plain"
    gate_RND: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    eps: float = 0.0

    def rows(self, part: slice) -> Activations:
        gate = None if self.gate_RND is None else self.gate_RND[part]
        return replace(self, x_RI=self.x_RI[part], gate_RND=gate)


class _Activations(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "gate", "weight")),
        *((n, ctypes.c_int) for n in ("source", "rows", "gate_width", "gate_pitch", "gate_row", "gate_shift")),
        ("eps", ctypes.c_float),
        ("by_fours", ctypes.c_int),
    )


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
        *((name, ctypes.c_int) for name in ("count", "groups", "columns", "chunk", "forms", "unused")),
    )


def forms_of(weights: Sequence[Matrix]) -> int:
    """The forms in which these matrices read a row of activations."""
    return (FLOATS if any(w.format != "q8_0" for w in weights) else 0) | (
        CODES if any(w.format == "q8_0" for w in weights) else 0
    )


def staged_bytes(columns: int, forms: int) -> int:
    """Shared memory of a staged row of ``columns``, whole steps (``Staged`` of linear.h)."""
    return (4 * columns if forms & FLOATS else 0) + (2 * columns + columns // 8 if forms & CODES else 0)


@dataclass(frozen=True)
class _Plan:
    """Rows of weights a warp, threads of a block, blocks."""

    of_warp: int
    threads: int
    blocks: int


def _shift(width: int, columns: int) -> int:
    """By how many bits a column gives its head of ``width`` columns; -1 where no number of bits does."""
    if width == columns:
        return 31
    return width.bit_length() - 1 if width & (width - 1) == 0 else -1


def most_threads(of_warp: int) -> int:
    """Of a block whose warps take so many rows of weights."""
    return 32 * NARROW_WARPS if of_warp == 1 else THREADS


def _plan(template: int, rows: Sequence[int], multiprocessors: int, others: int = 0) -> _Plan:
    """``rows`` of each matrix. Few are dealt evenly in one go: a block too many would double the time. ``others``:
    blocks of the launch that do something else."""
    resident = max(1, multiprocessors * RESIDENT_BLOCKS[template] - others)
    of_warp = 4 if template > 2 else 1 if template == 1 and sum(rows) <= resident * NARROW_WARPS else 2
    groups = sum(blocks_of(count, of_warp) for count in rows)
    warps = most_threads(of_warp) // 32
    if template <= 2 and groups <= resident * warps:
        warps = max(4, blocks_of(groups, resident))
    return _Plan(of_warp, 32 * warps, min(blocks_of(groups, warps), resident))


def template_rows(rows: int) -> int:
    """The kernel that serves ``rows`` rows: the next of 1, 2, 4, 8. A row's arithmetic is the same in all."""
    return next(size for size in (1, 2, 4, MAX_WINDOW) if rows <= size)


@dataclass(frozen=True, eq=False)
class ProductPart:
    """Products as a part of a launch (products.h). ``name``: which of the compiled forms, T x R of linear.cu."""

    template: int
    name: str
    threads: int
    blocks: int
    shared: int
    activations: _Activations
    matrices: _Matrices
    most_threads: int  # that a block of this form may have


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
        self.launch(
            "linear.embedding", (rows,), THREADS, self.inputs, self.pointer(table.data), self.pointer(table.scales),
            table.format, table.rows, table_VH.columns, table.row_bytes, y_TH,
        )  # fmt: skip
        return y_TH

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        return self.linears(x_TI, [weight_OI])[0]

    def linears(self, x_TI: torch.Tensor, weights: Sequence[Matrix]) -> list[torch.Tensor]:
        """A gated norm of heads of ``NORM_WIDTH`` that was put off is done while the rows are read."""
        columns = int(x_TI.shape[-1])
        x_RI = x_TI.reshape(-1, columns)
        activations = Activations(x_RI)
        norm = self.take("gated_norm", x_TI)
        if norm is not None:
            o_TNV, z_TNV, weight_V, eps, gate = norm
            activations = Activations(o_TNV.view(x_RI.shape), f"norm {gate}", z_TNV, weight_V, eps)
        return self._products(activations, x_TI.shape[:-1], weights)

    def gated_linear(
        self, gate: torch.Tensor, x: torch.Tensor, weight_OI: Matrix, kind: Literal["sigmoid", "silu"]
    ) -> torch.Tensor:
        agree("gated_linear shapes", gate.shape, x.shape)
        rows = int(x.shape[0])
        gate_RND = gate if gate.dim() == 3 else gate.view(rows, 1, -1)
        agree("gated_linear columns lie together", gate_RND.stride(2), 1)
        attended = self.take("attend", x) if kind == "sigmoid" and gate_RND.shape == x.shape else None
        if attended is not None:  # the gate is where the rows are made
            attended[0](gate_RND)
            return self._products(Activations(x.reshape(rows, -1)), (rows,), [weight_OI])[0]
        activations, y_TO = Activations(x.reshape(rows, -1), kind, gate_RND), self.empty(rows, weight_OI.rows)
        if rows > MAX_WINDOW:
            return self._products(activations, (rows,), [weight_OI])[0]
        return self.put_off(
            "gated_linear", y_TO, lambda: self._launch_products(activations, [weight_OI], [y_TO]),
            activations, weight_OI, y_TO,
        )  # fmt: skip

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

    def _products(self, a: Activations, leading: Sequence[int], weights: Sequence[Matrix]) -> list[torch.Tensor]:
        count = int(a.x_RI.shape[0])
        outputs = [self.empty(*leading, weight.rows) for weight in weights]
        for first in range(0, count, MAX_WINDOW):  # more rows than a window: streams of one
            rows = slice(first, first + MAX_WINDOW)
            for cut in range(0, len(weights), MOST_MATRICES):
                places = [y.view(count, -1)[rows] for y in outputs[cut : cut + MOST_MATRICES]]
                self._launch_products(a.rows(rows), weights[cut : cut + MOST_MATRICES], places)
        return outputs

    def _launch_products(self, a: Activations, weights: Sequence[Matrix], outputs: list[torch.Tensor]) -> None:
        self.settle()  # before what it records leaves a place to bring weights
        self.bring_matrices(weights)
        part = self.product_part(a, weights, outputs)
        kind = "" if a.source == "plain" and part.template <= 2 else "_any"  # Kind of linear.cu
        self.launch(
            f"linear.linears_{part.name}{kind}", (part.blocks,), part.threads, part.activations, part.matrices,
            self.ahead(AHEAD_BYTES if sum(w.data.nbytes for w in weights) < MOST_CARRYING else 0, part.blocks),
            shared=part.shared,
        )  # fmt: skip

    def bring_matrices(self, weights: Sequence[Matrix]) -> None:
        self.bring([tensor for weight in weights for tensor in (weight.scales, weight.data)])

    def product_part(
        self,
        a: Activations,
        weights: Sequence[Matrix],
        outputs: Sequence[torch.Tensor],
        reserved: int = 0,
        others: int = 0,
    ) -> ProductPart:
        """Of up to ``MAX_WINDOW`` rows and ``MOST_MATRICES`` weights. The launch needs ``reserved`` bytes of shared
        memory and ``others`` blocks for something else."""
        rows, columns = self.rows_of(a.x_RI), int(a.x_RI.shape[1])
        template, forms = template_rows(rows), forms_of(weights)
        room = max(1, (self.shared_bytes - reserved) // (staged_bytes(STEP_COLUMNS, forms) * template))
        chunk = STEP_COLUMNS * min(room, -(-columns // STEP_COLUMNS))
        plan = _plan(template, [weight.rows for weight in weights], self.program.multiprocessors, others)
        all_of = _Matrices(count=len(weights), columns=columns, chunk=chunk, forms=forms)
        groups = 0
        # Rows of floats take longest, so they come first.
        slowest_first = sorted(zip(weights, outputs, strict=True), key=lambda pair: pair[0].format == "q8_0")
        for place, (weight, y) in enumerate(slowest_first):
            agree("linear columns", columns, weight.columns)
            native = self.matrix(weight)
            native.y, native.first = self.address(y), groups
            all_of.of[place] = native
            groups += blocks_of(weight.rows, plan.of_warp)
        all_of.groups = groups
        shared = staged_bytes(chunk, forms) * template
        return ProductPart(
            template,
            f"{template}x{plan.of_warp}",
            plan.threads,
            plan.blocks,
            shared,
            self._native(a),
            all_of,
            most_threads(plan.of_warp),
        )

    def no_product(self, rows: int) -> ProductPart:
        """What a launch that may hold products takes where there are none."""
        template = template_rows(rows)
        of_warp = min(template, 4)
        return ProductPart(
            template,
            f"{template}x{of_warp}",
            most_threads(of_warp),
            0,
            0,
            _Activations(),
            _Matrices(),
            most_threads(of_warp),
        )

    def _native(self, a: Activations) -> _Activations:
        rows, columns = a.x_RI.shape
        gate = a.x_RI.view(rows, 1, columns) if a.gate_RND is None else a.gate_RND
        self.program.kept.append(gate)
        layout = (columns, int(gate.shape[2]), gate.stride(1), gate.stride(0), gate.data_ptr() // 4)
        return _Activations(
            x=self.address(a.x_RI), gate=gate.data_ptr(), weight=self.address(a.weight), source=_SOURCES[a.source],
            rows=rows, gate_width=gate.shape[2], gate_pitch=gate.stride(1), gate_row=gate.stride(0),
            gate_shift=_shift(int(gate.shape[2]), columns), eps=a.eps,
            by_fours=int(all(size % 4 == 0 for size in (*layout, a.x_RI.data_ptr() // 4))),
        )  # fmt: skip
