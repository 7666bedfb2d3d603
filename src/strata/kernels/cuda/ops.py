"""``CudaOps``: the operations of ``strata.kernels.ops``, recorded as launches of a program instead of computed.

Lives in ``kernels/cuda`` because it is the binding of the row kernels there: it checks shapes, takes memory for the
output and appends launches. Row t of a result is the same bits for any number of rows and any grid (rows.h says how).
No torch arithmetic happens on the way, only views. It must not know a model family or a tier.
"""

from __future__ import annotations

from strata.kernels.cuda.attention_ops import AttentionOps
from strata.kernels.cuda.delta_ops import DeltaOps
from strata.kernels.cuda.stream_ops import StreamOps

__all__ = ["CudaOps"]


class CudaOps(AttentionOps, StreamOps, DeltaOps):
    """``strata.kernels.ops.Ops`` for windows of 1 to MAX_WINDOW rows: ``CudaOps(program, inputs)``.

    What changes from round to round is read from ``inputs``: ``ids`` and ``start`` arguments are not looked at, but for
    the number of ids. Caches (keys, values, block keys) are passed whole, ``pending`` rows as MAX_WINDOW rows. Returned
    tensors are memory of the program and hold values once the program has run. ``argmax`` is replaced by
    ``argmax_rows``. Shapes that do not agree and widths that the kernels do not hold raise ``EngineError``.
    """

    name = "cuda"
