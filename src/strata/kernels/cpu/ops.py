"""``CpuOps``: the operations of ``strata.kernels.ops`` on the native row kernels of csrc/cpu/rows*.

Lives here because it is the binding of those kernels: it checks shapes, makes the output and passes addresses, a few
microseconds an operation. Row t of a result is the same bits for any number of rows and threads and on every
instruction set (csrc/cpu/rows.h says how). It must not know a model family or a tier.
"""

from __future__ import annotations

from strata.kernels.composed import ComposedOps
from strata.kernels.cpu.attention_ops import AttentionOps
from strata.kernels.cpu.delta_ops import DeltaOps
from strata.kernels.cpu.row_ops import RowOps
from strata.kernels.cpu.stream_ops import StreamOps

__all__ = ["CpuOps"]


class CpuOps(RowOps, AttentionOps, StreamOps, DeltaOps, ComposedOps):
    """The native implementation of ``strata.kernels.ops.Ops``. Stateless; calls may come from any thread.

    Shapes that do not agree, types other than FP32 (BF16 in caches) and widths that the kernels do not hold raise
    ``EngineError``. Inputs that are not contiguous are copied first, except caches and the state of ``gated_delta``.
    """

    name = "cpu"
