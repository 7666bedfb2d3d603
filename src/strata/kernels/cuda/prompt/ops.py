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
from strata.kernels.ops import DeltaRows, Matrix
from strata.kernels.reference import ReferenceOps

__all__ = ["DenseWeights", "PromptOps"]

DELTA_WIDTHS = (32, 64, 128)  # kernels of delta_prompt.cu
DELTA_COLUMNS, DELTA_THREADS = 16, 128
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
    blocks = weight.data[first:stop].unflatten(1, (-1, 32)) * weight.scales[first:stop].float().unsqueeze(-1)
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
        return [self._product(x_TI if weight.format == "f32" else rounded, weight) for weight in weights]

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

    # Mixers ------------------------------------------------------------------------------------------------------

    def causal_conv(
        self, x_TC: torch.Tensor, tail_UC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1
    ) -> torch.Tensor:
        """The tail precedes the chunk's first row, wherever in the frame that is."""
        rows, before, first = x_TC.shape[0], tail_UC.shape[0], self._frame.first
        z = torch.zeros(before + rows, x_TC.shape[1], device=x_TC.device)
        z[before + first :] = x_TC[first:]
        z[first : first + before] = tail_UC
        y_TC = z[:rows] * weight_CW[:, 0]
        for tap in range(1, weight_CW.shape[1]):
            y_TC.addcmul_(z[tap * dilation : tap * dilation + rows], weight_CW[:, tap])
        return torch.nn.functional.silu(y_TC)

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
        """Which positions each row sees, T x P of the frame's end: its tail and all tokens of the chosen blocks."""
        frame = self._frame
        device = q_TND.device
        position_T = torch.arange(frame.start, frame.end, device=device)
        blocks = frame.end // block
        keys = torch.zeros(blocks, key_BD.shape[1], device=device)
        keys[: key_BD.shape[0]] = key_BD[:blocks]
        visible_TB = torch.arange(blocks, device=device)[None, :] < ((position_T + 1) // block)[:, None]
        scores_TB = torch.zeros(frame.rows, blocks, device=device)
        for head in range(q_TND.shape[1]):
            scores_TB += self._calls.product(q_TND[:, head].contiguous(), keys).relu()
        scores_TB = torch.where(scores_TB.isnan(), -1.0, scores_TB).masked_fill_(~visible_TB, -2.0)
        chosen_TB = visible_TB & _largest(scores_TB, top_blocks) if blocks > top_blocks else visible_TB
        seen_TP = chosen_TB.repeat_interleave(block, dim=1)
        positions = torch.arange(frame.end, device=device)
        tail_T = (position_T + 1) // block * block
        return seen_TP | ((positions >= tail_T[:, None]) & (positions <= position_T[:, None]))

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
        """``blocks_TM`` as ``select_blocks`` gives it."""
        if blocks_TM is None:
            return self.attention(q_TND, k_PGD, v_PGD, start, scale)
        return self._calls.masked_attention(q_TND.bfloat16(), k_PGD.bfloat16(), v_PGD.bfloat16(), blocks_TM, scale)


def _largest(scores_TB: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest of each row are, of equal ones those of lower number."""
    least_T1 = scores_TB.topk(count, dim=1, sorted=True).values[:, -1:]
    above, equal = scores_TB > least_T1, scores_TB == least_T1
    wanted = count - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= wanted))
