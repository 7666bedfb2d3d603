"""Hyper-connections and the n-gram gate, recorded: launches of streams.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from strata.kernels.cuda.linear_ops import (
    STEP_COLUMNS,
    LinearOps,
    NativeMatrix,
    forms_of,
    staged_bytes,
    template_rows,
)
from strata.kernels.cuda.program import MAX_WINDOW
from strata.kernels.cuda.recorder import agree, blocks_of
from strata.kernels.cuda.row_ops import RowOps
from strata.kernels.ops import HyperWeights, NgramWeights

__all__ = ["StreamOps"]

THREADS, GATE_THREADS = 256, 1024
DOWN_BLOCKS = 132  # about; the threads of mix_down's blocks are a function of the shape alone
FEWEST_WARPS, MOST_WARPS = 4, 16  # of mix_down
MOST_UP_WARPS, MOST_UP_WARPS_ANY = 20, 12  # of mix_up
DOWN_AHEAD_BYTES, AHEAD_BYTES = 16 << 20, 12 << 20  # of later weights that the two launches of a mix bring
DOWN_ROOM = 256  # bytes that mix_down takes of shared memory for itself


class _Added(ctypes.Structure):
    """``Added`` of streams.cu."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("out", "c", "y", "gate", "more"))


class _Mixer(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("added", _Added),
        ("down", NativeMatrix),
        ("inject", NativeMatrix),
        ("up", NativeMatrix),
        *((name, ctypes.c_uint64) for name in ("shares", "inverses", "u", "c")),
        *((name, ctypes.c_int) for name in ("rows", "streams", "columns", "rank")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("down_forms", "up_forms")),
        ("share", ctypes.c_float),
    )


def _padded(columns: int) -> int:
    return -(-columns // STEP_COLUMNS) * STEP_COLUMNS


def _fast_format(weights: HyperWeights, streams: int, columns: int) -> str | None:
    """The one format of a mixer of the shape that kernels are made for (streams.cu)."""
    rank, matrices = weights.down.rows, (weights.down, weights.up, weights.inject or weights.up)
    formats = {matrix.format for matrix in matrices}
    is_shape = streams == 4 and columns % STEP_COLUMNS == 0 and rank % 32 == 0 and rank <= STEP_COLUMNS
    if not is_shape or len(formats) > 1 or any(matrix.data.data_ptr() % 16 for matrix in matrices):
        return None
    format = formats.pop()
    return format if format in ("q8_0", "bf16") else None


class StreamOps(LinearOps, RowOps):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def start_streams(self, x_TH: torch.Tensor, streams: int) -> torch.Tensor:
        rows, columns = x_TH.shape
        y_TSH = self.empty(rows, streams, columns)
        self.launch(
            "pointwise.start_streams", (self.stride_blocks(y_TSH.numel(), THREADS),), THREADS,
            x_TH, rows, streams, columns, y_TSH,
        )  # fmt: skip
        return y_TSH

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Two launches; more where shared memory holds no window of rows."""
        rows, (_, streams, columns) = self.rows_of(x_TSH), x_TSH.shape
        down, up, inject = weights.down, weights.up, weights.inject
        agree("hyper_mix norm", tuple(weights.norm_SH.shape), (streams, columns))
        agree(
            "hyper_mix down and up", (down.columns, up.rows, up.columns), (streams * columns, down.columns, down.rows)
        )
        u_TH, c_TS = self.empty(rows, columns), None
        if inject is not None:
            agree("hyper_mix inject", (inject.rows, inject.columns), (streams, streams * columns))
            c_TS = self.empty(rows, streams)
        row_bytes = staged_bytes(_padded(columns), forms_of([down] if inject is None else [down, inject]))
        most = (self.shared_bytes - DOWN_ROOM) // row_bytes  # rows of activations that a block holds
        is_fast = _fast_format(weights, streams, columns) is not None
        at_once = next((size for size in ((8, 4, 2) if is_fast else (8,)) if size <= most), 1)
        added = self.take("hyper_add", x_TSH)
        for first in range(0, rows, at_once):
            part = slice(first, first + at_once)
            place = x_TSH[part]
            before = None if added is None else [None if one is None else one[part] for one in added]
            self._mix(place, before, weights, u_TH[part], None if c_TS is None else c_TS[part])
        return u_TH, c_TS

    def _mix(
        self,
        x_TSH: torch.Tensor,
        added: Sequence[torch.Tensor | None] | None,
        weights: HyperWeights,
        u_TH: torch.Tensor,
        c_TS: torch.Tensor | None,
    ) -> None:
        """``added``: x, c, y, gate and more, whose sum is written to ``x_TSH`` first."""
        rows, streams, columns = x_TSH.shape
        down, inject = weights.down, weights.inject
        before = x_TSH if added is None else added[0]
        mixer = _Mixer(
            x=self.address(before),
            added=_Added() if added is None else _Added(self.address(x_TSH), *map(self.address, added[1:])),
            norm=self.address(weights.norm_SH), down=self.matrix(down, streams),
            inject=NativeMatrix() if inject is None else self.matrix(inject, streams), up=self.matrix(weights.up),
            shares=self.address(self.scratch("mixer shares", rows, streams, down.rows + streams)),
            inverses=self.address(self.scratch("mixer norms", rows, streams)), u=self.address(u_TH),
            c=self.address(c_TS), rows=rows, streams=streams, columns=columns, rank=down.rows, eps=weights.eps,
            down_forms=forms_of([down] if inject is None else [down, inject]), up_forms=forms_of([weights.up]),
            share=1.0 / columns,
        )  # fmt: skip
        self.settle()
        self.bring([w.scales for w in (down, inject) if w is not None])
        self.bring([w.data for w in (down, inject) if w is not None])
        format = _fast_format(weights, streams, columns)
        is_fast = format is not None
        template = template_rows(rows) if is_fast or rows == 1 else MAX_WINDOW
        name = f"{format or 'any'}_{template}"
        sums = down.rows + (0 if inject is None else inject.rows)
        warps = min(max(FEWEST_WARPS, blocks_of(sums, max(1, DOWN_BLOCKS // streams))), MOST_WARPS)
        grid = (blocks_of(sums, warps), streams)
        self.launch(
            f"streams.mix_down_{name}", grid, 32 * warps, mixer, _padded(columns),
            self.ahead(DOWN_AHEAD_BYTES, grid[0] * grid[1]),
            shared=template * staged_bytes(_padded(columns), mixer.down_forms),
        )  # fmt: skip
        self.bring([weights.up.scales, weights.up.data])  # first of all by the launch before it
        multiprocessors = self.program.multiprocessors
        most = MOST_UP_WARPS if is_fast else MOST_UP_WARPS_ANY
        warps = min(max(FEWEST_WARPS, blocks_of(columns, multiprocessors)), most)
        blocks = min(blocks_of(columns, warps), 2 * multiprocessors)
        self.launch(
            f"streams.mix_up_{name}", (blocks,), 32 * warps, mixer, _padded(down.rows),
            self.ahead(AHEAD_BYTES, blocks), shared=template * staged_bytes(_padded(down.rows), mixer.up_forms),
        )  # fmt: skip

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        """Put off: ``hyper_mix`` of its result takes it into its own launch, with an ``add_gated`` before it."""
        rows, streams, columns = x_TSH.shape
        agree("hyper_add shapes", (tuple(c_TS.shape), tuple(y_TH.shape)), ((rows, streams), (rows, columns)))
        out_TSH = self.empty(rows, streams, columns)
        gated = self.take("add_gated", y_TH)
        first_TH, gate_T1, more_TH = (y_TH, None, None) if gated is None else gated

        def record() -> None:
            if gate_T1 is not None and more_TH is not None:
                self.scaled_sum(first_TH, gate_T1, more_TH, y_TH)
            self.launch(
                "streams.hyper_add", (self.stride_blocks(out_TSH.numel(), THREADS),), THREADS,
                x_TSH, c_TS, y_TH, rows, streams, columns, out_TSH,
            )  # fmt: skip

        return self.put_off("hyper_add", out_TSH, record, x_TSH, c_TS, first_TH, gate_T1, more_TH)

    def ngram_gate(
        self, key_TSH: torch.Tensor, value_TH: torch.Tensor, x_TSH: torch.Tensor, weights: NgramWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, streams, columns = key_TSH.shape
        norms = (weights.norm_key_SH, weights.norm_query_SH, weights.norm_conv_SH)
        agree("ngram_gate shapes", (key_TSH.shape, tuple(value_TH.shape)), (x_TSH.shape, (rows, columns)))
        agree("ngram_gate norms", {tuple(w.shape) for w in norms}, {(streams, columns)})
        gated_TSH, normed_TSH = self.empty(rows, streams, columns), self.empty(rows, streams, columns)
        self.launch(
            "streams.ngram_gate", (rows * streams,), GATE_THREADS, key_TSH, value_TH, x_TSH, *norms, weights.eps,
            streams, columns, gated_TSH, normed_TSH,
        )  # fmt: skip
        return gated_TSH, normed_TSH
