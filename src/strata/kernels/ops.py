"""The operations a model's layers are written in: one protocol, several implementations.

Lives in ``kernels`` because an implementation is a set of kernels: ``reference`` (torch, FP32,
differentiable, any device) and ``cpu`` (native, row-invariant, what a decode round and a CPU prompt
run). Layers and models call these for all arithmetic, so one block order serves every implementation; with
torch itself a layer only makes views: a copy is an operation too. Nothing here knows a model family or where an expert
lies.

Legend of shape suffixes: T rows (tokens of a window or a chunk), H hidden width, I input width, O output
width, V vocabulary, N query or value heads, G key/value heads, D head width, P cache positions, E experts, K top-k,
R rotary half width, S residual streams, C convolution channels, W taps, U tail rows, F low rank, B index blocks,
J tokens of an index block, M blocks listed a row. Tensors are contiguous, FP32 unless said otherwise. Outputs are
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

__all__ = [
    "DeltaRows",
    "DeltaWeights",
    "ExpertExecutor",
    "HyperWeights",
    "Matrix",
    "MatrixFormat",
    "NgramWeights",
    "Ops",
]

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


@dataclass(frozen=True, eq=False)
class HyperWeights:
    """Weights of one hyper-connection mixer over S streams of width H. Matrices are borrowed."""

    norm_SH: torch.Tensor  # S x H, used as 1 + norm
    down: Matrix  # F x (S*H)
    up: Matrix  # (S*H) x F
    inject: Matrix | None  # S x (S*H); None for the mixer before the head
    eps: float


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """The small weights and the sizes of one gated delta net. Channels C = 2*G*D + N*V: queries, keys, values."""

    conv_CW: torch.Tensor
    log_decay_N: torch.Tensor  # the checkpoint's A_log
    dt_bias_N: torch.Tensor
    key_heads: int  # G
    value_heads: int  # N, a multiple of G
    key_width: int  # D
    value_width: int  # V


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """What the delta rule needs of T rows to update a state: the record of a window. Owned by whoever holds it."""

    k_TGD: torch.Tensor  # unit length
    v_TNV: torch.Tensor
    beta_TN: torch.Tensor
    g_TN: torch.Tensor  # log decay, <= 0

    def first(self, count: int) -> DeltaRows:
        """The first ``count`` rows, as views."""
        return DeltaRows(self.k_TGD[:count], self.v_TNV[:count], self.beta_TN[:count], self.g_TN[:count])


@dataclass(frozen=True, eq=False)
class NgramWeights:
    """The three norms of an n-gram embedding's gate, each S x H and used as 1 + weight."""

    norm_key_SH: torch.Tensor
    norm_query_SH: torch.Tensor
    norm_conv_SH: torch.Tensor
    eps: float


class ExpertExecutor(Protocol):
    """Computes the routed experts of one layer, wherever they lie. The only door from layers to tiers."""

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
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

    def linears(self, x_TI: torch.Tensor, weights: Sequence[Matrix]) -> list[torch.Tensor]:
        """``linear`` with each of several matrices over the same rows: the same bits, perhaps one launch."""

    def gated_linear(
        self, gate: torch.Tensor, x: torch.Tensor, weight_OI: Matrix, kind: Literal["sigmoid", "silu"]
    ) -> torch.Tensor:
        """y_TO = (kind(gate) * x) W^T: ``sigmoid_mul`` or ``silu_mul``, then ``linear``. Both are T x I, or T x N x D
        with N*D = I; the gate may be a view whose heads lie apart."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        """x * rsqrt(mean(x^2) + eps) * (weight, or 1 + weight) over the last axis (any leading axes)."""

    def rope(self, x_TND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        """Rotates the first 2R of D: halves [0,R) and [R,2R) paired (the 'rotate half' form); the rest is copied."""

    def norm_rope(
        self,
        heads: Sequence[tuple[torch.Tensor, torch.Tensor]],
        eps: float,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        *,
        plus_one: bool,
    ) -> list[torch.Tensor]:
        """rope(rms_norm(x)) of several (x_TND, weight_D) of one width; x may be a view whose heads lie apart."""

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

    def add_gated(self, y_TH: torch.Tensor, gate_T1: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """y + sigmoid(gate) * x, one gate a row."""

    def argmax(self, logits_TV: torch.Tensor) -> list[int]:
        """Per row the lowest id among the largest logits. A row with a NaN gives -1."""

    def swiglu(self, x_TH: torch.Tensor, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> torch.Tensor:
        """y_TH = (silu(x gate^T) * (x up^T)) down^T: a dense (shared) expert in one call."""

    # Hyper-connections -------------------------------------------------------------------------------------------

    def start_streams(self, x_TH: torch.Tensor, streams: int) -> torch.Tensor:
        """x_TSH: every stream starts as the embedding."""

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(u_TH, c_TS): what a block reads of the streams, and how strongly its output is written back.

        n_TSH = x * rsqrt(mean over H(x^2) + eps) * (1 + norm); m = sigmoid(up(silu(down(n) / S))) as T x S x H, where
        the matrices act on n flattened to S*H; u = (1/S) * sum over s ascending of m_s * n_s;
        c = 2 sigmoid(inject(n) / S), or None when the weights have no ``inject``.
        """

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        """x_s + c_s * y, a new T x S x H."""

    # Gated delta net ---------------------------------------------------------------------------------------------

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        """y_TC = silu of the depthwise causal convolution; the last tap meets the row itself.

        U = (W-1) * dilation rows precede row 0, oldest first (zeros at the start of a sequence): with z = tail ++ x,
        y[t] = silu(sum over w ascending of weight[:, w] * z[t + w * dilation]). The caller keeps the new tail.
        """

    def delta_inputs(
        self,
        qkv_TC: torch.Tensor,
        tail_UC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        weights: DeltaWeights,
    ) -> tuple[torch.Tensor, DeltaRows]:
        """(q_TGD, rows): everything between the projections and the recurrence, in one call.

        z = causal_conv(qkv, tail, conv) split along C into q (G*D), k (G*D), v (N*V); q and k each times
        rsqrt(sum over D(x^2) + 1e-6), q then times D ** -0.5; beta = sigmoid(b);
        g = -exp(log_decay) * softplus(a + dt_bias), softplus(x) = log1p(exp(x)), x itself above 20.
        """

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        """o_TNV of the gated delta rule. ``pending`` rows, accepted earlier, are first folded into ``state`` IN PLACE.

        The rows then run in order on a copy of the state; ``write`` makes that copy the state (in place: a prompt),
        otherwise the state stays as ``pending`` left it (a window). One row, with h = n // (N / G) and S = state[n]:
        S *= exp(g); d = (v - S^T k_h) * beta; S += k_h d^T; o = S^T q_h. Folding does the same without o, so folding
        row by row, as windows of any size, or with ``write`` gives the same bits in a native implementation.
        """

    def gated_norm(
        self,
        o_TNV: torch.Tensor,
        z_TNV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: Literal["sigmoid", "silu"],
    ) -> torch.Tensor:
        """weight * o * rsqrt(mean over V(o^2) + eps) * gate(z). The weight is plain, not 1 + weight."""

    # Sparse attention --------------------------------------------------------------------------------------------

    def index_block_keys(
        self, raw_BJD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_BR: torch.Tensor, sin_BR: torch.Tensor
    ) -> torch.Tensor:
        """key_BD of B complete blocks: rope(rms_norm(mean over J ascending(raw), 1 + weight)) at the block's first
        position, whose cosines and sines are given."""

    def select_blocks(
        self, q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int
    ) -> torch.Tensor:
        """ids int32 T x top_blocks: which complete blocks each row attends, ascending, padded with -1 at the end.

        Row t sees n = (start + t + 1) // block complete blocks (key_BD has at least as many rows). With n <= top_blocks
        all of them; otherwise the top_blocks by (score descending, id ascending), score = sum over heads ascending of
        relu(q_n . key). A NaN score sorts last. The constant 1/sqrt(D) of the score changes no order and is left out.
        """

    def sparse_attention(
        self,
        q_TND: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        start: int,
        scale: float,
        blocks_TM: torch.Tensor | None,
        block: int,
    ) -> torch.Tensor:
        """o_TND as ``attention``, but row t attends only the tokens of its listed blocks (id i: [i*block, (i+1)*block))
        and of the incomplete tail [((start+t+1) // block) * block, start + t], in ascending order of position.

        ``blocks_TM`` None means every complete block for every row. A row whose list holds all complete blocks is the
        same bits as with None and as ``attention`` gives.
        """

    # N-gram embedding --------------------------------------------------------------------------------------------

    def ngram_gate(
        self, key_TSH: torch.Tensor, value_TH: torch.Tensor, x_TSH: torch.Tensor, weights: NgramWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gated_TSH, normed_TSH). All norms are per stream over H, times 1 + weight.

        a = sum over H(norm_key(key) * norm_query(x)) / sqrt(H) per stream; a = sign(a) * sqrt(max(|a|, 1e-6));
        gated = sigmoid(a) * value; normed = norm_conv(gated): the input of the dilated convolution.
        """
