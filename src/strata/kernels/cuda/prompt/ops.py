"""``PromptOps``: the operations of ``strata.kernels.ops`` over one pass of a prompt, on a card or its emulation.

Lives in ``kernels/cuda/prompt``. A pass is a whole frame of rows that begins at a multiple of their number; the rows of
it that are not the chunk's are padding, whose values nobody reads. Products are BF16 with FP32 sums, everything between
them FP32 (decision record 0130). It must not know a model family or a tier.

Legend: as in ``kernels/ops.py``; T rows of the frame.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from strata.errors import EngineError
from strata.kernels.cuda.program import Argument, Launch
from strata.kernels.cuda.prompt.calls import LibraryCalls
from strata.kernels.cuda.prompt.frame import BLOCK_ROWS, Frame
from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights, Matrix, NgramWeights
from strata.kernels.reference import ReferenceOps

__all__ = ["DenseWeights", "PromptOps"]

DELTA_WIDTHS = (32, 64, 128)  # kernels of delta_blocks.cu
SMALL_PITCH = 80  # of delta_blocks.cu
GATE_THREADS, GATE_WARPS, INPUT_STEPS, MOST_TAPS = 256, 8, 32, 8  # of gates_prompt.cu
GATED_WIDTH, ROTARY_WIDTH, ROUTED = 128, 256, 1024
SPLIT_TILE, SPLIT_THREADS, FEWEST_SPLIT = 64, 128, 8  # of split_product.cu
HELD_HIDDEN = 4096  # of streams_add_norm
ATTENDED_WIDTHS = (32, 64, 128, 256)  # kernels of attend_prompt.cu
ATTENDING, SELECTING, KEYS, MOST_HEADS = 128, 256, 32, 16
STREAM_THREADS = 256  # of streams_prompt.cu
MOST_KEPT = 1 << 27  # weights of a matrix that is dequantised whole; a head's is larger, and used once a prompt


class _Blocks(ctypes.Structure):
    """``Blocks`` of delta_blocks.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("q", "k", "v", "beta", "decay", "through", "within", "own", "decays", "state", "out")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("first", "stop", "key_heads", "value_heads", "key_width", "value_width")
        ),
    )  # fmt: skip


class _Inputs(ctypes.Structure):
    """``Inputs`` of gates_prompt.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "x", "tail", "weight", "b", "a", "log_decay", "bias", "q", "k", "v", "beta", "decay"
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in ("first", "stop", "taps", "key_heads", "value_heads", "key_width", "value_width")
        ),
        ("scale", ctypes.c_float),
    )  # fmt: skip


class _Heads(ctypes.Structure):
    """``Heads`` of gates_prompt.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "weight", "cosines", "sines", "out")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "width", "half", "apart", "pitch", "plus_one")),
        ("eps", ctypes.c_float),
    )


class _Sparse(ctypes.Structure):
    """``Sparse`` of attend_prompt.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "listed", "out")),
        *((name, ctypes.c_int) for name in ("start", "first", "most", "block", "heads", "groups", "width")),
        ("scale", ctypes.c_float),
    )


class _Split(ctypes.Structure):
    """``Split`` of split_product.cu."""

    _fields_ = (
        ("x", ctypes.c_uint64), ("w", ctypes.c_uint64 * 2), ("y", ctypes.c_uint64 * 2),
        *(
            (name, ctypes.c_int)
            for name in (
                "rows", "outputs", "columns", "segments", "positive", "start", "first", "stop", "block"
            )
        ),
    )  # fmt: skip


class DenseWeights:
    """Matrices as products read them; what is made of them stays until ``forget``. ``launch`` as for ``PromptOps``."""

    def __init__(self, launch: Callable[[list[Launch]], None]) -> None:
        self._launch = launch
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, weight: Matrix) -> torch.Tensor:
        """FP32 or BF16 O x I."""
        if weight.format != "q8_0":
            return weight.data
        key = (weight.data.data_ptr(), weight.rows)
        if key not in self._kept:
            self._kept[key] = self.dequantised(weight, 0, weight.rows)
        return self._kept[key]

    def joined(self, first: Matrix, second: Matrix) -> torch.Tensor:
        """BF16: the rows of both, and zeros up to a multiple of eight."""
        key = (first.data.data_ptr(), -second.data.data_ptr())
        if key not in self._kept:
            rows = first.rows + second.rows
            whole = torch.zeros(-(-rows // 8) * 8, first.columns, dtype=torch.bfloat16, device=first.data.device)
            whole[: first.rows] = self.get(first)
            whole[first.rows : rows] = self.get(second)
            self._kept[key] = whole
        return self._kept[key]

    def dequantised(self, weight: Matrix, first: int, stop: int) -> torch.Tensor:
        """Rows [first, stop) of 8-bit weights, each rounded to BF16 once."""
        assert weight.scales is not None
        codes, scales = weight.data[first:stop], weight.scales[first:stop]
        out = torch.empty(stop - first, weight.columns, dtype=torch.bfloat16, device=codes.device)
        arguments = (codes, scales, weight.columns, codes.shape[1], out)
        grid = (stop - first, -(-weight.columns // (4 * GATE_THREADS)), 1)
        self._launch([Launch("gates_prompt.dequantise", grid, GATE_THREADS, 0, arguments)])
        return out

    def forget(self) -> None:
        self._kept.clear()


def _pieces(weight: Matrix) -> list[tuple[int, int]]:
    """Ranges of rows of a large matrix that are dequantised at once."""
    step = max(1, MOST_KEPT // weight.columns)
    return [(first, min(first + step, weight.rows)) for first in range(0, weight.rows, step)]


class PromptOps(ReferenceOps):
    """See ``Ops``. One serves one frame; ``launch`` runs kernels in the stream of torch's own."""

    name = "prompt"

    def __init__(
        self, frame: Frame, calls: LibraryCalls, weights: DenseWeights, launch: Callable[[list[Launch]], None]
    ) -> None:
        self._frame, self._calls, self._weights, self._launch = frame, calls, weights, launch
        self._owed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # see hyper_add
        self._rounded: tuple[torch.Tensor, torch.Tensor] | None = None  # a mixer's last output, and it in BF16

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        return self.linears(x_TI, [weight_OI])[0]

    def linears(self, x_TI: torch.Tensor, weights: Sequence[Matrix]) -> list[torch.Tensor]:
        """FP32 matrices are multiplied as sums of two BF16 ones, two of one shape in one launch (0134)."""
        known = self._rounded
        rounded = known[1] if known is not None and known[0] is x_TI else None
        if rounded is None and any(weight.format != "f32" for weight in weights):
            rounded = x_TI.bfloat16()
        found: dict[int, torch.Tensor] = {}
        split = [
            number
            for number, weight in enumerate(weights)
            if weight.format == "f32" and weight.rows >= FEWEST_SPLIT and weight.columns % 4 == 0
        ]
        while split:
            first = split.pop(0)
            same = [other for other in split if weights[other].data.shape == weights[first].data.shape][:1]
            split = [other for other in split if other not in same]
            both = [first, *same]
            matrices = [weights[number].data.contiguous() for number in both]
            found |= zip(both, self._split(x_TI.float().contiguous(), matrices, 1, None), strict=True)
        for number, weight in enumerate(weights):
            if number not in found:
                found[number] = self._product(x_TI.float() if weight.format == "f32" else rounded, weight)
        return [found[number] for number in range(len(weights))]

    def _split(
        self, x_TX: torch.Tensor, matrices: Sequence[torch.Tensor], segments: int, block: int | None
    ) -> list[torch.Tensor]:
        """Products of FP32 operands with each of one or two O x I matrices. With ``block``: scores, the sum over
        segments of x of what is above zero, of as many outputs as a row of the chunk may see."""
        frame, (rows, (outputs, columns)) = self._frame, (x_TX.shape[0], matrices[0].shape)
        found = [torch.empty(rows, outputs, device=x_TX.device) for _ in matrices]
        address = ctypes.c_uint64 * 2
        one = _Split(
            x_TX.data_ptr(), address(*(matrix.data_ptr() for matrix in matrices)),
            address(*(y_TO.data_ptr() for y_TO in found)), rows, outputs, columns, segments, int(block is not None),
            frame.start, frame.first, frame.stop, block or 0,
        )  # fmt: skip
        grid = (-(-outputs // SPLIT_TILE), -(-rows // SPLIT_TILE), len(matrices))
        self._launch([Launch("split_product.split_product", grid, SPLIT_THREADS, 0, (one,))])
        return found

    def _product(self, x_TI: torch.Tensor | None, weight: Matrix) -> torch.Tensor:
        assert x_TI is not None
        if weight.format != "q8_0" or weight.rows * weight.columns <= MOST_KEPT:
            return self._calls.product(x_TI, self._weights.get(weight))
        parts = [self._calls.product(x_TI, self._weights.dequantised(weight, *piece)) for piece in _pieces(weight)]
        return torch.cat(parts, dim=-1)

    def gated_linear(
        self, gate: torch.Tensor, x: torch.Tensor, weight_OI: Matrix, kind: Literal["sigmoid", "silu"]
    ) -> torch.Tensor:
        rows, heads, width = (*x.shape[:-1], x.shape[-1]) if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        apart = gate.stride(1) if gate.dim() == 3 else 0
        out_TI = torch.empty(rows, heads * width, dtype=torch.bfloat16, device=x.device)
        arguments = (gate, x.contiguous(), heads, width, apart, gate.stride(0), int(kind == "silu"), out_TI)
        self._run("gated", (rows, -(-heads * width // GATE_THREADS), 1), *arguments)
        return self.linear(out_TI, weight_OI)

    def add_gated(self, y_TH: torch.Tensor, gate_T1: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        rows, width = x_TH.shape
        sum_TH = torch.empty_like(x_TH)
        arguments = (y_TH.contiguous(), gate_T1.contiguous(), x_TH, width, sum_TH)
        self._run("add_gated", (rows, -(-width // GATE_THREADS), 1), *arguments)
        return sum_TH

    def norm_rope(
        self,
        heads: Sequence[tuple[torch.Tensor, torch.Tensor]],
        eps: float,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        *,
        plus_one: bool,
    ) -> list[torch.Tensor]:
        if any(x.shape[-1] > ROTARY_WIDTH for x, _ in heads):
            return super().norm_rope(heads, eps, cos_TR, sin_TR, plus_one=plus_one)
        found = []
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
        for x, weight in heads:
            assert x.stride(2) == 1
            out = torch.empty(x.shape, device=x.device)
            tensors = (x, weight, cos_TR, sin_TR, out)
            one = _Heads(
                *(tensor.data_ptr() for tensor in tensors), *x.shape, cos_TR.shape[1], x.stride(1), x.stride(0),
                int(plus_one), eps,
            )  # fmt: skip
            self._run("norm_rope", (-(-x.shape[0] * x.shape[1] // GATE_WARPS), 1, 1), one)
            found.append(out)
        return found

    def router(self, logits_TE: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that are not the chunk's pick expert -1."""
        frame, (rows, experts) = self._frame, logits_TE.shape
        if experts > ROUTED:
            raise EngineError(f"a router of {experts} experts: prompts on a card are routed to at most {ROUTED}")
        ids_TK = torch.empty(rows, top_k, dtype=torch.int32, device=logits_TE.device)
        weights_TK = torch.empty(rows, top_k, device=logits_TE.device)
        arguments = (
            logits_TE, rows, frame.first, frame.stop, experts, top_k, int(renormalise), ids_TK, weights_TK,
        )  # fmt: skip
        self._run("route", (-(-rows // GATE_WARPS), 1, 1), *arguments)
        return ids_TK, weights_TK

    def _run(self, entry: str, grid: tuple[int, int, int], *arguments: Argument) -> None:
        self._launch([Launch(f"gates_prompt.{entry}", grid, GATE_THREADS, 0, arguments)])

    # Hyper-connections -------------------------------------------------------------------------------------------

    def hyper_mix(self, x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The normed streams are BF16, for all three products and for the mean."""
        rows, streams, hidden = x_TSH.shape
        n_TX = torch.empty(rows, streams * hidden, dtype=torch.bfloat16, device=x_TSH.device)
        owed = self._owed
        if owed is not None and owed[3] is x_TSH and hidden % 4 == 0 and hidden <= HELD_HIDDEN:
            self._owed = None
            added = (*owed[:3], weights.norm_SH, weights.eps, streams, hidden, x_TSH, n_TX)
            self._launch([Launch("streams_prompt.streams_add_norm", (rows, streams, 1), STREAM_THREADS, 0, added)])
        else:
            self._settle()
            arguments = (x_TSH, weights.norm_SH, weights.eps, streams, hidden, n_TX)
            self._launch([Launch("streams_prompt.streams_norm", (rows, streams, 1), STREAM_THREADS, 0, arguments)])
        low_TF, c_TS = self._hyper_gates(n_TX, streams, weights)
        gate_TX = self.linear(low_TF, weights.up)
        u_TH = torch.empty(rows, hidden, device=x_TSH.device)
        grid = (rows, -(-hidden // STREAM_THREADS), 1)
        rounded_TH = torch.empty(rows, hidden, dtype=torch.bfloat16, device=x_TSH.device)
        mixed = (gate_TX, n_TX, streams, hidden, u_TH, rounded_TH)
        self._launch([Launch("streams_prompt.streams_mix", grid, STREAM_THREADS, 0, mixed)])
        self._rounded = (u_TH, rounded_TH)
        return u_TH, c_TS

    def _hyper_gates(
        self, n_TX: torch.Tensor, streams: int, weights: HyperWeights
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(low_TF BF16, c_TS): one product for both, because reading the streams is what each would wait for."""
        rows, rank, inject = n_TX.shape[0], weights.down.rows, weights.inject
        if inject is None:
            found = self.linear(n_TX, weights.down)
        elif "f32" in (weights.down.format, inject.format):
            found = torch.cat(self.linears(n_TX, [weights.down, inject]), dim=1)
        else:
            found = self._calls.product(n_TX, self._weights.joined(weights.down, inject))
        low_TF = torch.empty(rows, rank, dtype=torch.bfloat16, device=n_TX.device)
        c_TS = torch.empty(rows, streams, device=n_TX.device)
        arguments = (found, found.shape[1], rank, streams, int(inject is not None), low_TF, c_TS)
        grid = (rows, -(-(rank + streams) // STREAM_THREADS), 1)
        self._launch([Launch("streams_prompt.streams_gates", grid, STREAM_THREADS, 0, arguments)])
        return low_TF, None if inject is None else c_TS

    def hyper_add(self, x_TSH: torch.Tensor, c_TS: torch.Tensor, y_TH: torch.Tensor) -> torch.Tensor:
        """The sum is owed until someone reads it: most often the next mixer, which computes it on the way."""
        self._settle()
        sum_TSH = torch.empty_like(x_TSH)
        self._owed = (x_TSH, c_TS, y_TH.contiguous(), sum_TSH)
        return sum_TSH

    def _settle(self) -> None:
        """Computes the streams that are owed: before any operation that may read streams."""
        if self._owed is None:
            return
        (rows, streams, hidden), owed = self._owed[0].shape, self._owed
        self._owed = None
        grid = (rows, -(-hidden // STREAM_THREADS), 1)
        arguments = (*owed[:3], streams, hidden, owed[3])
        self._launch([Launch("streams_prompt.streams_add", grid, STREAM_THREADS, 0, arguments)])

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._settle()
        return super().add(x, y)

    def ngram_gate(
        self, key_TSH: torch.Tensor, value_TH: torch.Tensor, x_TSH: torch.Tensor, weights: NgramWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._settle()
        return super().ngram_gate(key_TSH, value_TH, x_TSH, weights)

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

    def delta_inputs(
        self,
        qkv_TC: torch.Tensor,
        tail_UC: torch.Tensor,
        b_TN: torch.Tensor,
        a_TN: torch.Tensor,
        weights: DeltaWeights,
    ) -> tuple[torch.Tensor, DeltaRows]:
        """Queries, keys and values are BF16; rows that are not the chunk's are left as they are."""
        frame, device, taps = self._frame, qkv_TC.device, weights.conv_CW.shape[1]
        groups, heads, key, value = weights.key_heads, weights.value_heads, weights.key_width, weights.value_width
        if max(key, value) > GATED_WIDTH or taps > MOST_TAPS:
            raise EngineError(
                f"a delta net of {key} and {value} values a head and {taps} taps: prompts on a card are read with at "
                f"most {GATED_WIDTH} values and {MOST_TAPS} taps"
            )
        rows = qkv_TC.shape[0]
        q, k, v = (
            torch.empty(rows, count, width, dtype=torch.bfloat16, device=device)
            for count, width in ((groups, key), (groups, key), (heads, value))
        )
        beta, decay = torch.empty(rows, heads, device=device), torch.empty(rows, heads, device=device)
        given = (qkv_TC, tail_UC, weights.conv_CW, b_TN, a_TN, weights.log_decay_N, weights.dt_bias_N)
        tensors = [*(tensor.contiguous() for tensor in given), q, k, v, beta, decay]
        one = _Inputs(
            *(tensor.data_ptr() for tensor in tensors), frame.first, frame.stop, taps, groups, heads, key, value,
            key**-0.5,
        )  # fmt: skip
        self._run("delta_inputs", (2 * groups + heads + 1, -(-frame.count // INPUT_STEPS), 1), one)
        return q, DeltaRows(k, v, beta, decay)

    def gated_delta(
        self, q_TGD: torch.Tensor, rows: DeltaRows, state_NDV: torch.Tensor, pending: DeltaRows | None, *, write: bool
    ) -> torch.Tensor:
        """By blocks of ``BLOCK_ROWS`` rows that begin at multiples of it: a chunk begins and ends with one (0133)."""
        assert pending is None
        assert write, "rows of a prompt are certain"
        assert state_NDV.is_contiguous()
        frame, device, (heads, key_width, value_width) = self._frame, state_NDV.device, state_NDV.shape
        wide = next((wide for wide in DELTA_WIDTHS if max(key_width, value_width) <= wide), None)
        if wide is None or key_width % 8 or value_width % 8:
            raise EngineError(
                f"a delta net with heads of {key_width} and {value_width} values: prompts on a card are read with at "
                f"most {DELTA_WIDTHS[-1]}, by eights"
            )
        blocks = -(-q_TGD.shape[0] // BLOCK_ROWS)
        o_TNV = (torch.empty if frame.count == frame.rows else torch.zeros)(rows.v_TNV.shape, device=device)
        room = (
            torch.empty(blocks, heads, BLOCK_ROWS, wide, dtype=torch.bfloat16, device=device),
            torch.empty(blocks, heads, BLOCK_ROWS, BLOCK_ROWS, dtype=torch.bfloat16, device=device),
            torch.empty(blocks, heads, wide, BLOCK_ROWS, device=device),
            torch.empty(blocks, heads, 2, BLOCK_ROWS, device=device),
        )
        given = (q_TGD.bfloat16(), rows.k_TGD.bfloat16(), rows.v_TNV.bfloat16(), rows.beta_TN, rows.g_TN)
        tensors = [*(tensor.contiguous() for tensor in given), *room, state_NDV, o_TNV]
        one = _Blocks(
            *(tensor.data_ptr() for tensor in tensors), frame.first, frame.stop, q_TGD.shape[1], heads, key_width,
            value_width,
        )  # fmt: skip
        first, stop = frame.first // BLOCK_ROWS, -(-frame.stop // BLOCK_ROWS)
        shared = 2 * (3 * BLOCK_ROWS * (2 * wide + 16) + BLOCK_ROWS * SMALL_PITCH + 256)
        warps = min(4, wide // 16)
        self._launch(
            [
                Launch(f"delta_blocks.prepare_{wide}", (stop - first, heads, 1), 128, 0, (one,)),
                Launch(f"delta_blocks.scan_{wide}", (wide // (16 * warps), heads, 1), 32 * warps, shared, (one,)),
            ]
        )
        return o_TNV

    def gated_norm(
        self,
        o_TNV: torch.Tensor,
        z_TNV: torch.Tensor,
        weight_V: torch.Tensor,
        eps: float,
        gate: Literal["sigmoid", "silu"],
    ) -> torch.Tensor:
        """BF16: only a product reads it."""
        rows, heads, width = o_TNV.shape
        if width > GATED_WIDTH:
            return super().gated_norm(o_TNV, z_TNV, weight_V, eps, gate)
        normed_TNV = torch.empty(o_TNV.shape, dtype=torch.bfloat16, device=o_TNV.device)
        arguments = (o_TNV, z_TNV.contiguous(), weight_V, eps, rows * heads, width, int(gate == "silu"), normed_TNV)
        self._run("gated_norm", (-(-rows * heads // GATE_WARPS), 1, 1), *arguments)
        return normed_TNV

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
        if blocks and q_TND.shape[2] % 4 == 0:
            (scores_TB,) = self._split(q_TND.flatten(1).contiguous(), [keys.contiguous()], q_TND.shape[1], block)
        else:
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
