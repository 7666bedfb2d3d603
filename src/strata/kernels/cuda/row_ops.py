"""The operations that every family uses besides products, recorded: launches of pointwise.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. It must not know models.
"""

from __future__ import annotations

import torch

from strata.errors import EngineError
from strata.kernels.cuda.recorder import Recorder, agree, blocks_of

__all__ = ["RowOps"]

THREADS = 256
WIDE_THREADS = 512  # of a row that is wider
NARROW = 1024  # columns up to which a warp takes a row of a norm
MOST_EXPERTS = 64 * 32
FUSED_EXPERTS = 512  # that the experts' first launch routes among
MOST_ADDED = 2  # of one causal_conv
ARGMAX_COLUMNS = 4096  # of a part


class RowOps(Recorder):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        """A sum that was put off is done in the same launch."""
        columns = int(x.shape[-1])
        agree("rms_norm width", weight.numel(), columns)
        y = self.empty(*x.shape)
        rows = x.numel() // columns
        blocks = blocks_of(rows, THREADS // 32) if columns <= NARROW else rows
        added = self.take("add", x)
        first, more = (x, None) if added is None else added
        tensors = (first, x, weight, y) if more is None else (first, more, x, weight, y)
        self.launch(
            "pointwise.rms_norm", (blocks,), THREADS if columns <= NARROW else WIDE_THREADS, first,
            self.pointer(self.address(more)), x, weight, eps, float(plus_one), rows, columns,
            int(all(tensor.data_ptr() % 16 == 0 for tensor in tensors)), y,
        )  # fmt: skip
        return y

    def rope(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        rows, heads, width = x_TND.shape
        half = cos_TR.shape[-1]
        agree("rope tables", (tuple(cos_TR.shape), tuple(sin_TR.shape)), ((rows, half), (rows, half)))
        if 2 * half > width:
            raise EngineError(f"rope of {2 * half} columns in heads of {width}")
        y_TND = self.empty(rows, heads, width)
        self.launch(
            "pointwise.rope", (self.stride_blocks(x_TND.numel(), THREADS),), THREADS,
            x_TND, cos_TR, sin_TR, rows, heads, width, half, y_TND,
        )  # fmt: skip
        return y_TND

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Put off: the experts' first launch takes it, and a gated product that waits as well (``expert_step``)."""
        rows, experts = logits_TE.shape
        if not 1 <= top_k <= experts <= MOST_EXPERTS:
            raise EngineError(f"top {top_k} of {experts} experts, at most {MOST_EXPERTS} are routed")
        ids_TK, weights_TK = self.empty(rows, top_k, dtype=torch.int32), self.empty(rows, top_k)

        def record() -> None:
            self.launch(
                "pointwise.router", (rows,), 32, logits_TE, experts, top_k, int(renormalise), ids_TK, weights_TK
            )

        if experts <= FUSED_EXPERTS:
            self.put_off("router", ids_TK, record, logits_TE, weights_TK, renormalise, after="gated_linear")
        else:
            record()
        return ids_TK, weights_TK

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._pairwise(0, gate, up)

    def sigmoid_mul(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._pairwise(1, gate, x) if gate.shape == x.shape else self._scale(gate, x, None)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Put off: ``rms_norm`` of its result takes it into its own launch. Up to two sums with what may be added to
        where it is made ("sum") are done there."""
        agree("shapes of a pair", x.shape, y.shape)
        sum_xy = self.empty(*x.shape)
        made = self.take("sum", y)
        if made is not None:
            launch, before = made
            added = (*before, x)
            if len(added) == MOST_ADDED:
                launch(sum_xy, added)
                return sum_xy
            return self.put_off("sum", sum_xy, lambda: launch(sum_xy, added), launch, added)
        return self.put_off("add", sum_xy, lambda: self._pair(2, x, y, sum_xy), x, y)

    def add_gated(self, y_TH: torch.Tensor, gate_T1: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """Put off: ``hyper_add`` takes it into its own launch."""
        agree("add_gated shapes", (y_TH.shape, tuple(gate_T1.shape)), (x_TH.shape, (*x_TH.shape[:-1], 1)))
        sum_TH = self.empty(*x_TH.shape)
        return self.put_off(
            "add_gated", sum_TH, lambda: self.scaled_sum(y_TH, gate_T1, x_TH, sum_TH), y_TH, gate_T1, x_TH
        )

    def argmax(self, logits_TV: torch.Tensor) -> list[int]:
        """Raises ``EngineError``: a recorded operation has no value yet. ``argmax_rows`` is its recorded form."""
        raise EngineError("argmax of a recorded round is read from argmax_rows after the round")

    def argmax_rows(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """int32 T: per row the lowest id among the largest logits, -1 for a row with a NaN. Two launches."""
        rows, columns = logits_TV.shape
        parts = blocks_of(columns, ARGMAX_COLUMNS)
        largest = self.scratch("argmax", rows, parts, dtype=torch.int64)
        ids_T = self.empty(rows, dtype=torch.int32)
        self.launch("pointwise.argmax_parts", (parts, rows), THREADS, logits_TV, columns, largest)
        self.launch("pointwise.argmax_rows", (rows,), THREADS, largest, parts, ids_T)
        return ids_T

    def _pairwise(self, kind: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        agree("shapes of a pair", left.shape, right.shape)
        y = self.empty(*left.shape)
        self._pair(kind, left, right, y)
        return y

    def _pair(self, kind: int, left: torch.Tensor, right: torch.Tensor, y: torch.Tensor) -> None:
        blocks = self.stride_blocks(left.numel(), THREADS)
        self.launch("pointwise.pairwise", (blocks,), THREADS, left, right, kind, left.numel(), y)

    def scaled_sum(self, y_TH: torch.Tensor, gate_T1: torch.Tensor, x_TH: torch.Tensor, sum_TH: torch.Tensor) -> None:
        """The launch of ``add_gated``."""
        self._scale(gate_T1, x_TH, y_TH, sum_TH)

    def _scale(
        self, gate: torch.Tensor, x: torch.Tensor, base: torch.Tensor | None, y: torch.Tensor | None = None
    ) -> torch.Tensor:
        columns = int(x.shape[-1])
        agree("gates of rows", tuple(gate.shape), (*x.shape[:-1], 1))
        y = self.empty(*x.shape) if y is None else y
        self.launch(
            "pointwise.sigmoid_scale", (self.stride_blocks(x.numel(), THREADS),), THREADS,
            gate, x, self.pointer(self.address(base)), x.numel() // columns, columns, y,
        )  # fmt: skip
        return y
