"""The operations a model's layers are written in: one protocol, several implementations.

Lives in ``kernels`` because an implementation is a set of kernels: ``reference`` (torch, FP32,
differentiable, any device) and ``cpu`` (native, row-invariant, what a decode round and a CPU prompt
run). Layers and models call these and nothing else, so one block order serves both. Nothing here
knows a model family or where an expert lies.

Legend of shape suffixes: T rows (tokens of a window or a chunk), H hidden width, I input width, O output
width, V vocabulary, N query heads, G key/value heads, D head width, P cache positions, E experts, K top-k,
R rotary half width, S residual streams. Tensors are contiguous, FP32 unless said otherwise. Outputs are
new tensors owned by the caller; inputs are never changed unless an operation says so.

Row invariance, the law of every native implementation: row t of an output is the same bits whatever T is
and whatever the other rows hold, for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["ExpertExecutor", "Matrix", "MatrixFormat", "Ops"]

MatrixFormat = Literal["f32", "bf16", "q8_0"]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A dense weight, O rows of I input weights, in one of the formats that a round reads.

    ``f32``/``bf16``: ``data`` is a tensor O x I of that type. ``q8_0``: ``data`` is int8 O x I' and ``scales``
    FP16 O x (I'/32), I' = I rounded up to 32 with zero weights; weight = data * scale. ``columns`` is I.
    """

    format: MatrixFormat
    data: torch.Tensor
    columns: int
    scales: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def nbytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        return self.data.numel() * self.data.element_size() + scales


class ExpertExecutor(Protocol):
    """Computes the routed experts of one layer, wherever they lie. The only door from layers to tiers."""

    def __call__(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Returns y_TH = sum over k, in router order by FMA from zero, of weights[t,k] * expert[ids[t,k]](x[t]).

        ``ids_TK`` is int32 in [0, E), ``weights_TK`` FP32.
        """


class Ops(Protocol):
    """See the module's page. ``Matrix`` arguments are borrowed and must outlive the call."""

    name: str

    def embedding(self, ids: Sequence[int], table_VH: Matrix) -> torch.Tensor:
        """x_TH, rows of the table as FP32."""

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        """y_TO = x W^T, FP32 activations; bias-free."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        """x * rsqrt(mean(x^2) + eps) * (weight, or 1 + weight) over the last axis (any leading axes)."""

    def rope(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        """Rotates the first 2R of D: halves [0,R) and [R,2R) paired (the 'rotate half' form); the rest is copied."""

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        """o_TND; causal: row t attends cache positions [0, start + t], which hold the rows' own keys and values.

        k and v are FP32 or BF16 (a view of the first positions of a cache; only axis 0 may be longer than needed).
        Query head n reads key/value head n // (N / G). Softmax in FP32.
        """

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids_TK int32, weights_TK): softmax over E, the top_k by (logit descending, id ascending), in that order;
        ``renormalise`` divides by their sum. NaN logits sort last, so ids stay in range for any input."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, elementwise."""

    def sigmoid_mul(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """sigmoid(gate) * x, elementwise; gate is broadcast over the last axis when its last size is 1."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + y, elementwise."""

    def argmax(self, logits_TV: torch.Tensor) -> list[int]:
        """Per row the lowest id among the largest logits. A row with a NaN gives -1."""
