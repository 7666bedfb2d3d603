"""Attention over a cache, over selected blocks, and the selection, recorded: launches of attention.cu and index.cu.

A part of ``CudaOps`` (ops.py), apart to keep files short. ``start`` arguments are not looked at: the position is
``RoundInputs.position``, and caches are passed whole. It must not know models.
"""

from __future__ import annotations

import ctypes

import torch

from strata.errors import EngineError
from strata.kernels.cuda.head_ops import HeadOps
from strata.kernels.cuda.program import Program, RoundInputs
from strata.kernels.cuda.recorder import agree, blocks_of

__all__ = ["AttentionOps"]

CUT = 64  # entries of a list of positions that are joined first
HEADS = 4  # query heads of a block
WIDEST = 256
THREADS = 256
AHEAD_BYTES = 12 << 20  # of later weights that the last launch of attention brings
LANES = (8, 16, 32)  # of a group that reads a row of the cache, 8 columns each
RESIDENT = 2  # blocks of `attend` that a multiprocessor has registers for
SELECT_THREADS = 1024


class _Shape(ctypes.Structure):
    """``Shape`` of attention.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "blocks", "sums", "values")),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "group", "parts", "width", "pitch")),
        *((name, ctypes.c_int) for name in ("listed", "block", "shift", "is_full", "positions", "cuts")),
        ("scale", ctypes.c_float),
    )


class _Gate(ctypes.Structure):
    """``Gate`` of attention.cu."""

    _fields_ = (("x", ctypes.c_uint64), ("head", ctypes.c_int), ("row", ctypes.c_int))


class AttentionOps(HeadOps):
    """See ``strata.kernels.ops.Ops``, whose methods these are."""

    def __init__(
        self, program: Program, inputs: RoundInputs, shared_bytes: int = 48 << 10, cache_bytes: int = 0
    ) -> None:
        super().__init__(program, inputs, shared_bytes, cache_bytes)
        self._selected: set[int] = set()  # addresses of lists that hold as many complete blocks as they can

    def attention(
        self, q_TND: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor, start: int, scale: float
    ) -> torch.Tensor:
        return self._attend(q_TND, k_PGD, v_PGD, scale, None, 1)

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
        return self._attend(q_TND, k_PGD, v_PGD, scale, blocks_TM, block)

    def _attend(
        self,
        q_TND: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        scale: float,
        blocks_TM: torch.Tensor | None,
        block: int,
    ) -> torch.Tensor:
        rows, (_, heads, width) = self.rows_of(q_TND), q_TND.shape
        positions, kv_heads, _ = k_PGD.shape
        _check_cache(k_PGD, v_PGD, width)
        listed, longest = 0, positions
        if blocks_TM is not None:
            agree("sparse_attention lists", (blocks_TM.dtype, blocks_TM.shape[0]), (torch.int32, rows))
            listed = int(blocks_TM.shape[1])
            longest = min(positions, listed * block + block - 1)
        cuts = blocks_of(longest, CUT)
        lanes = next(lanes for lanes in LANES if width <= 8 * lanes) if width % 8 == 0 else LANES[-1]
        out_TND, pitch, group = self.empty(rows, heads, width), 8 * lanes, heads // kv_heads
        is_full = blocks_TM is not None and blocks_TM.data_ptr() in self._selected
        shape = _Shape(
            q=self.address(q_TND), k=self.address(k_PGD), v=self.address(v_PGD), blocks=self.address(blocks_TM),
            sums=self.address(self.scratch("cut sums", rows, heads, cuts, 2)),
            values=self.address(self.scratch("cut values", rows, heads, cuts, pitch)),
            heads=heads, kv_heads=kv_heads, group=group, parts=blocks_of(group, HEADS), width=width, pitch=pitch,
            listed=listed, block=block,
            shift=block.bit_length() - 1 if block & (block - 1) == 0 else -1, is_full=int(is_full),
            positions=positions, cuts=cuts, scale=scale,
        )  # fmt: skip
        groups = kv_heads * shape.parts
        at_once = min(cuts, max(1, RESIDENT * self.program.multiprocessors // (groups * rows)))
        self.settle_rows()
        kind = "bf16" if k_PGD.dtype == torch.bfloat16 else "f32"
        size = lanes if width % 8 == 0 else "any"
        self.launch(f"attention.attend_{kind}_{size}", (rows, groups, at_once), THREADS, self.inputs, shape)
        grid = (heads, pitch // 64, rows)

        def combine(gate_TND: torch.Tensor | None) -> None:
            gate = _Gate()
            if gate_TND is not None:
                self.program.kept.append(gate_TND)
                gate = _Gate(gate_TND.data_ptr(), gate_TND.stride(1), gate_TND.stride(0))
            ahead = self.ahead(AHEAD_BYTES, heads * grid[1] * rows)
            self.launch("attention.attend_combine", grid, THREADS, self.inputs, shape, gate, out_TND, ahead)

        return self.put_off("attend", out_TND, lambda: combine(None), combine)

    def select_blocks(
        self, q_TND: torch.Tensor, key_BD: torch.Tensor, start: int, block: int, top_blocks: int
    ) -> torch.Tensor:
        """One launch for one row; else two, a multiprocessor for every row's selection."""
        rows, (_, heads, width) = self.rows_of(q_TND), q_TND.shape
        blocks = int(key_BD.shape[0])
        agree("select_blocks width", (key_BD.shape[1], width <= WIDEST), (width, True))
        scores_TB = self.scratch("block scores", rows, max(1, blocks))
        ids_TM = self.empty(rows, top_blocks, dtype=torch.int32)
        arrived = self.program.zeros(1, dtype=torch.int32) if rows == 1 else None
        self.launch(
            "index.score_blocks", (min(blocks_of(blocks, SELECT_THREADS // 32), self.program.multiprocessors),),
            SELECT_THREADS, self.inputs, q_TND, key_BD, rows, heads, width, block, top_blocks, blocks, scores_TB,
            self.pointer(self.address(arrived)), ids_TM, shared=rows * heads * width * 4,
        )  # fmt: skip
        if arrived is None:
            self.launch(
                "index.select_blocks", (rows,), SELECT_THREADS,
                self.inputs, scores_TB, block, top_blocks, blocks, ids_TM,
            )  # fmt: skip
        self._selected.add(ids_TM.data_ptr())
        return ids_TM


def _check_cache(k_PGD: torch.Tensor, v_PGD: torch.Tensor, width: int) -> None:
    agree("shapes of keys and values", k_PGD.shape, v_PGD.shape)
    agree("types of keys and values", k_PGD.dtype, v_PGD.dtype)
    agree("widths of queries and keys", width, k_PGD.shape[2])
    if k_PGD.dtype not in (torch.float32, torch.bfloat16):
        raise EngineError(f"a cache of {k_PGD.dtype}: float32 and bfloat16 are read")
    if width > WIDEST:
        raise EngineError(f"heads of {width} columns, at most {WIDEST} are read")
