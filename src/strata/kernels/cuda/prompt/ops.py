"""``PromptOps``: the operations of ``strata.kernels.ops`` over one pass of a prompt, on a card or its emulation.

Lives in ``kernels/cuda/prompt``. A pass is a whole frame of rows that begins at a multiple of their number; the rows of
it that are not the chunk's are padding, whose values nobody reads. Products are BF16 with FP32 sums, everything between
them FP32 (decision record 0130). It must not know a model family or a tier.

Legend: as in ``kernels/ops.py``; T rows of the frame.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import Launch
from strata.kernels.cuda.prompt.calls import LibraryCalls
from strata.kernels.cuda.prompt.frame import Frame
from strata.kernels.ops import DeltaRows, HyperWeights, Matrix
from strata.kernels.reference import ReferenceOps

__all__ = ["DenseWeights", "PromptOps"]

DELTA_WIDTHS = (32, 64, 128)  # kernels of delta_prompt.cu
DELTA_COLUMNS, DELTA_THREADS = 16, 128
ATTENDED_WIDTHS = (32, 64, 128, 256)  # kernels of attend_prompt.cu
ATTENDING, SELECTING, KEYS, MOST_HEADS = 128, 256, 32, 16
STREAM_THREADS = 256  # of streams_prompt.cu
AT_ONCE = 1 << 23  # weights that are dequantised at once: in between they are FP32
MOST_KEPT = 1 << 27  # weights of a matrix that is kept dequantised; a head's is larger, and used once a prompt


class _Delta(ctypes.Structure):
    """``Delta`` of delta_prompt.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "beta", "decay", "state", "out")),
        *(
            (name, ctypes.c_int)
            for name in ("first", "stop", "key_heads", "value_heads", "key_width", "value_width")
        ),
    )  # fmt: skip


class _Sparse(ctypes.Structure):
    """``Sparse`` of attend_prompt.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "listed", "out")),
        *((name, ctypes.c_int) for name in ("start", "first", "most", "block", "heads", "groups", "width")),
        ("scale", ctypes.c_float),
    )


class DenseWeights:
    """Matrices as products read them; what is dequantised stays until ``forget``."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, weight: Matrix) -> torch.Tensor:
        """FP32 or BF16 O x I."""
        if weight.format != "q8_0":
            return weight.data
        found = self._kept.get(weight.data.data_ptr())
        if found is None or found.shape[0] != weight.rows:
            found = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=weight.data.device)
            for first, stop in _pieces(weight):
                found[first:stop] = _dequantised(weight, first, stop)
            self._kept[weight.data.data_ptr()] = found
        return found

    def forget(self) -> None:
        self._kept.clear()


def _pieces(weight: Matrix) -> list[tuple[int, int]]:
    """Ranges of rows that are dequantised at once."""
    step = max(1, AT_ONCE // weight.columns)
    return [(first, min(first + step, weight.rows)) for first in range(0, weight.rows, step)]


def _dequantised(weight: Matrix, first: int, stop: int) -> torch.Tensor:
    """Rows [first, stop) of 8-bit weights, each rounded to BF16 once."""
    assert weight.scales is not None
    blocks = torch.unflatten(weight.data[first:stop], 1, (-1, 32)) * weight.scales[first:stop].float().unsqueeze(-1)
    return blocks.bfloat16().flatten(1)[:, : weight.columns]


class PromptOps(ReferenceOps):
    """See ``Ops``. One serves one frame; ``launch`` runs kernels in the stream of torch's own."""

    name = "prompt"

    def __init__(
        self, frame: Frame, calls: LibraryCalls, weights: DenseWeights, launch: Callable[[list[Launch]], None]
    ) -> None:
        self._frame, self._calls, self._weights, self._launch = frame, calls, weights, launch

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        return self.linears(x_TI, [weight_OI])[0]

    def linears(self, x_TI: torch.Tensor, weights: Sequence[Matrix]) -> list[torch.Tensor]:
        rounded = None if all(weight.format == "f32" for weight in weights) else x_TI.bfloat16()
        return [self._product(x_TI.float() if weight.format == "f32" else rounded, weight) for weight in weights]

    def _product(self, x_TI: torch.Tensor | None, weight: Matrix) -> torch.Tensor:
        assert x_TI is not None
        if weight.format != "q8_0" or weight.rows * weight.columns <= MOST_KEPT:
            return self._calls.product(x_TI, self._weights.get(weight))
        parts = [self._calls.product(x_TI, _dequantised(weight, *piece)) for piece in _pieces(weight)]
        return torch.cat(parts, dim=-1)

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that are not the chunk's pick expert -1."""
        ids_TK, weights_TK = super().router(logits_TE, top_k, renormalise=renormalise)
        ids_TK[: self._frame.first] = -1
        ids_TK[self._frame.stop :] = -1
        return ids_TK, weights_TK

    # Hyper-connections -------------------------------------------------------------------------------------------

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The normed streams are BF16, for all three products and for the mean."""
        rows, streams, hidden = x_TSH.shape
        n_TX = torch.empty(rows, streams * hidden, dtype=torch.bfloat16, device=x_TSH.device)
        arguments = (x_TSH, weights.norm_SH, weights.eps, streams, hidden, n_TX)
        self._launch([Launch("streams_prompt.streams_norm", (rows, streams, 1), STREAM_THREADS, 0, arguments)])
        low_TF = torch.nn.functional.silu(self.linear(n_TX, weights.down) / streams)
        gate_TX = self.linear(low_TF, weights.up)
        u_TH = torch.empty(rows, hidden, device=x_TSH.device)
        grid = (rows, -(-hidden // STREAM_THREADS), 1)
        self._launch(
            [Launch("streams_prompt.streams_mix", grid, STREAM_THREADS, 0, (gate_TX, n_TX, streams, hidden, u_TH))]
        )
        if weights.inject is None:
            return u_TH, None
        return u_TH, 2.0 * (self.linear(n_TX, weights.inject) / streams).sigmoid()

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        rows, streams, hidden = x_TSH.shape
        sum_TSH = torch.empty_like(x_TSH)
        grid = (rows, -(-hidden // STREAM_THREADS), 1)
        arguments = (x_TSH, c_TS, y_TH.contiguous(), streams, hidden, sum_TSH)
        self._launch([Launch("streams_prompt.streams_add", grid, STREAM_THREADS, 0, arguments)])
        return sum_TSH

    # Mixers ------------------------------------------------------------------------------------------------------

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        """The tail precedes the chunk's first row, wherever in the frame that is; rows before it are zeros."""
        frame, channels = self._frame, x_TC.shape[1]
        y_TC = torch.zeros_like(x_TC) if frame.first else torch.empty_like(x_TC)
        arguments = (
            x_TC.contiguous(), tail_UC.contiguous(), weight_CW.contiguous(), weight_CW.shape[1], dilation, channels,
            frame.first, y_TC,
        )  # fmt: skip
        grid = (frame.rows - frame.first, -(-channels // STREAM_THREADS), 1)
        self._launch([Launch("streams_prompt.convolve", grid, STREAM_THREADS, 0, arguments)])
        return y_TC

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        """Row by row, by a kernel of our own: the state that it leaves depends on the rows alone."""
        assert pending is None
        assert write, "rows of a prompt are certain"
        frame, (heads, key_width, value_width) = self._frame, state_NDV.shape
        width = next((width for width in DELTA_WIDTHS if key_width <= width), None)
        if width is None:
            raise EngineError(f"a delta net with keys of {key_width} values: at most {DELTA_WIDTHS[-1]} are read")
        o_TNV = torch.zeros_like(rows.v_TNV)
        tensors = [q_TGD, rows.k_TGD, rows.v_TNV, rows.beta_TN, rows.g_TN, state_NDV, o_TNV]
        tensors = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        one = _Delta(
            *(tensor.data_ptr() for tensor in tensors), frame.first, frame.stop, q_TGD.shape[1], heads, key_width,
            value_width,
        )  # fmt: skip
        grid = (-(-value_width // DELTA_COLUMNS), heads, 1)
        self._launch([Launch(f"delta_prompt.delta_{width}", grid, DELTA_THREADS, 0, (one,))])
        return o_TNV

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        return self._calls.attention(q_TND.bfloat16(), k_PGD.bfloat16(), v_PGD.bfloat16(), scale)

    def select_blocks(
        self, q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int
    ) -> torch.Tensor:
        """Rows that are not the chunk's list nothing of use."""
        frame, device = self._frame, q_TND.device
        blocks = frame.end // block
        keys = key_BD
        if keys.shape[0] < blocks:  # of a frame that ends after the context
            keys = torch.nn.functional.pad(keys, (0, 0, 0, blocks - keys.shape[0]))
        scores_TB = torch.zeros(frame.rows, blocks, device=device)
        for head in range(q_TND.shape[1]):
            scores_TB += self._calls.product(q_TND[:, head].contiguous(), keys).relu_()
        listed_TM = torch.full((frame.rows, top_blocks), -1, dtype=torch.int32, device=device)
        arguments = (scores_TB, blocks, frame.start, frame.first, block, top_blocks, listed_TM)
        self._launch([Launch("attend_prompt.select_blocks", (frame.count, 1, 1), SELECTING, 0, arguments)])
        return listed_TM

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
        if blocks_TM is None:
            return self.attention(q_TND, k_PGD, v_PGD, start, scale)
        frame, (_, heads, width), groups = self._frame, q_TND.shape, k_PGD.shape[1]
        wide = next((wide for wide in ATTENDED_WIDTHS if width <= wide), None)
        if wide is None or width % 8 or heads // groups > MOST_HEADS:
            raise EngineError(
                f"sparse attention of {heads} heads of {width} values over {groups}: at most {ATTENDED_WIDTHS[-1]} "
                f"values, by eights, and {MOST_HEADS} heads a group are read"
            )
        most = blocks_TM.shape[1]
        o_TND = torch.zeros_like(q_TND)
        tensors = [q_TND.bfloat16(), k_PGD.bfloat16(), v_PGD.bfloat16(), blocks_TM, o_TND]
        tensors = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        one = _Sparse(
            *(tensor.data_ptr() for tensor in tensors), frame.start, frame.first, most, block, heads, groups, width,
            scale,
        )  # fmt: skip
        pitch = 2 * wide + (64 if wide % 64 == 0 else 0)
        shared = 4 * KEYS * pitch + 4 * MOST_HEADS * (KEYS + 1) + 4 * (most + 1) * block
        grid = (frame.count, groups, 1)
        self._launch([Launch(f"attend_prompt.attend_{wide}", grid, ATTENDING, shared, (one,))])
        return o_TND
