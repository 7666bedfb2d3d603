"""Hyper-connections and the n-gram gate, recorded: launches of streams.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from strata.kernels.cuda.linear_ops import STEP_COLUMNS, LinearOps, NativeMatrix, template_rows
from strata.kernels.cuda.recorder import agree, blocks_of
from strata.kernels.cuda.row_ops import RowOps
from strata.kernels.ops import HyperWeights, NgramWeights

__all__ = ["StreamOps"]

THREADS, GATE_THREADS = 256, 1024
DOWN_THREADS, DOWN_ROWS = 128, 2  # rows of a warp in mix_down
DOWN_ROOM = 256  # bytes that mix_down takes of shared memory for itself
UP_COLUMNS = {1: 2, 2: 1, 4: 1, 8: 1}  # columns of a warp in mix_up, by T


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
        ("unused", ctypes.c_int),
    )


def _padded(columns: int) -> int:
    return -(-columns // STEP_COLUMNS) * STEP_COLUMNS


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
        most = (self.shared_bytes - DOWN_ROOM) // (4 * _padded(columns))  # rows of activations that a block holds
        at_once = next((size for size in (8, 4, 2) if size <= most), 1)
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
        )  # fmt: skip
        template = template_rows(rows)
        groups = blocks_of(down.rows, DOWN_ROWS) + (0 if inject is None else blocks_of(inject.rows, DOWN_ROWS))
        self.launch(
            f"streams.mix_down_{template}", (blocks_of(groups, DOWN_THREADS // 32), streams), DOWN_THREADS,
            mixer, _padded(columns), shared=4 * template * _padded(columns),
        )  # fmt: skip
        groups = blocks_of(columns, UP_COLUMNS[template])
        blocks = min(blocks_of(groups, THREADS // 32), 2 * self.program.multiprocessors)
        self.launch(
            f"streams.mix_up_{template}", (blocks,), THREADS, mixer, _padded(down.rows),
            shared=4 * template * _padded(down.rows),
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
