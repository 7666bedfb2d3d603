"""Records a layer's routed experts in a round: split, exchange with the CPU, the GPU's own experts, the sum.

Lives beside ``round.cu`` and ``expert.cu``, whose launches it appends. Where an expert is read from is in tables of
device memory that the caller fills; the mailbox is the caller's too. It must not know tiers or models.

Legend: T rows, K picks of a row, P = T * K, L layers, E experts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from strata.errors import EngineError
from strata.kernels.cuda.experts import down_launch, gate_up_launch, shape_of
from strata.kernels.cuda.mailbox import Mailbox
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import MAX_WINDOW
from strata.quant.layout import ExpertLayout

__all__ = ["ExpertStep", "ExpertTables", "RoundMemory"]

_COMBINE_THREADS = 64
_IDLE_BYTES = 16 << 20  # of later weights that the last launch brings if it waits for the CPU
_AHEAD_BYTES = 8 << 20  # of later weights that the first and the last launch bring
_MOST_PICKS = 256  # kMostPicks of round.cu
_TASK_BYTES = 32
_QUANTISERS = 8  # blocks that quantise a row: kQuantisers of round.cu
_ROUTE_ROOM = 24 << 10  # bytes of shared memory that the first launch takes for itself
STATE_WORDS = 14  # RoundState of round.cu


class _PostShape(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int) for n in ("hidden", "padded", "rows", "top_k", "layer", "exchange", "num_experts")),
        ("balance", ctypes.c_int),
        ("fraction", ctypes.c_float),
    )


class _PostTables(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint64) for n in ("where", "alias", "scales", "counts"))


class _PostList(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint64) for n in ("tasks", "rows", "slots", "num_tasks", "by_cpu"))


class _PostMail(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint64) for n in ("box", "x", "tasks", "rows", "slots"))


class _Router(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_uint64) for n in ("logits", "ids", "weights")),
        *((n, ctypes.c_int) for n in ("renormalise", "unused")),
    )


class _CombineShape(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_int) for n in ("hidden", "top_k", "layer", "exchange"))


@dataclass(frozen=True, eq=False)
class ExpertTables:
    """In device memory, of all experts: ``where`` int64 [L, E], an address in device memory or 0; ``alias`` int64
    [L, E], the device's address of a page-locked copy or 0; ``scales`` FP32 [L, E, 3]; ``counts`` int32 [L, E], to
    which every pick is added. ``fraction`` of the misses are read over the link, of all of them if ``balance``, else
    of those with an alias (``experts.policy.split_pinned``)."""

    where: torch.Tensor
    alias: torch.Tensor
    scales: torch.Tensor
    counts: torch.Tensor
    fraction: float = 0.0
    balance: bool = True

    @classmethod
    def on(cls, device: torch.device, scales: torch.Tensor, fraction: float, *, balance: bool) -> ExpertTables:
        """Tables in which nothing is on the device. ``scales`` FP32 [L, E, 3]."""
        shape = scales.shape[:2]

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        scales = scales.contiguous().to(device)
        return cls(zeros(torch.int64), zeros(torch.int64), scales, zeros(torch.int32), fraction, balance)


@dataclass(frozen=True, eq=False)
class RoundMemory:
    """What rounds share in device memory: ``state`` (RoundState of round.cu) and a non-finite flag a row."""

    state: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> RoundMemory:
        return cls(
            torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            torch.zeros(MAX_WINDOW, dtype=torch.uint8, device=device),
        )


class ExpertStep:
    """An ``ExpertExecutor`` that records. One of these belongs to one program of T rows, the one that ``ops`` records;
    layers share its scratch."""

    def __init__(
        self, ops: CudaOps, layout: ExpertLayout, tables: ExpertTables, memory: RoundMemory, mailbox: Mailbox,
        rows: int, top_k: int,
    ) -> None:  # fmt: skip
        self._ops, self._program, self._layout, self._tables = ops, ops.program, layout, tables
        program = ops.program
        if rows * top_k > _MOST_PICKS:
            raise EngineError(
                f"{rows} rows of {top_k} picks, at most {_MOST_PICKS} picks are split in a round", "use --device cpu"
            )
        self._memory, self._mailbox = memory, mailbox
        self._rows, self._top_k = rows, top_k
        self._shape = shape_of(layout)
        self._num_experts = int(tables.where.shape[1])
        self.exchanges = 0
        picks, wide, narrow = rows * top_k, self._shape.wide, self._shape.narrow
        self._codes = program.empty(rows, wide * 64, dtype=torch.int8)
        self._scales = program.empty(rows, wide * 4)
        inner_type = (
            torch.float32 if layout.format == "bf16" else torch.int8
        )  # BF16 experts take activations as they are
        self._inner = program.zeros(picks, narrow * 64, dtype=inner_type)
        self._inner_scales = program.zeros(picks, narrow * 4)
        self._parts = program.empty(picks, layout.hidden)
        self._tasks = program.empty(picks, _TASK_BYTES, dtype=torch.uint8)
        self._pick_rows = program.empty(picks, dtype=torch.int32)
        self._pick_slots = program.empty(picks, dtype=torch.int32)
        self._num_tasks = program.zeros(4, dtype=torch.int32)
        self._by_cpu = program.zeros(picks, dtype=torch.uint8)

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Appends four launches; y_TH. A router that was put off, and the product that waits with it, are done in the
        first of them."""
        program, layout, memory, mail = self._program, self._layout, self._memory, self._mailbox
        assert tuple(ids_TK.shape) == (self._rows, self._top_k), "a program is of one window"
        exchange = self.exchanges
        self.exchanges += 1
        self._route(layer, exchange, x_TH, ids_TK)
        self._compute(x_TH)
        y_TH = program.empty(self._rows, layout.hidden)
        blocks = max(-(-layout.hidden // _COMBINE_THREADS), program.multiprocessors // self._rows)  # some only bring
        # The latest is filled first: what is brought while the CPU computes is what other launches have no time for.
        idle = self._ops.ahead(_IDLE_BYTES, blocks * self._rows)
        ahead = self._ops.ahead(_AHEAD_BYTES, blocks * self._rows)
        program.launch(
            "round.combine", (self._rows, blocks), _COMBINE_THREADS,
            _CombineShape(layout.hidden, self._top_k, layer, exchange),
            mail.device("box"), memory.state, self._by_cpu, self._parts, mail.device("out"), mail.device("flags"),
            weights_TK, y_TH, memory.flags, ahead, idle,
        )  # fmt: skip
        return y_TH

    def _route(self, layer: int, exchange: int, x_TH: torch.Tensor, ids_TK: torch.Tensor) -> None:
        layout, memory, mail, tables, ops = self._layout, self._memory, self._mailbox, self._tables, self._ops
        router, part = _Router(ids=ids_TK.data_ptr()), ops.no_product(self._rows)
        taken = ops.take("router", ids_TK)
        if taken is None:
            ops.settle()
        else:
            logits_TE, weights_TK, renormalise, product = taken
            router = _Router(ops.address(logits_TE), ids_TK.data_ptr(), ops.address(weights_TK), int(renormalise))
            if product is not None:
                activations, weight, y_TO = product
                ops.bring_matrices([weight])
                part = ops.product_part(activations, [weight], [y_TO], _ROUTE_ROOM, 1 + self._rows * _QUANTISERS)
        threads = part.most_threads
        groups = part.matrices.groups
        blocks = 1 + self._rows * _QUANTISERS + min(-(-groups // (threads // 32)), part.blocks)
        self._program.launch(
            f"round.route_{part.name}", (blocks,), threads,
            _PostShape(
                layout.hidden, self._shape.wide * 64, self._rows, self._top_k, layer, exchange, self._num_experts,
                int(tables.balance), tables.fraction,
            ),
            _PostTables(*(t.data_ptr() for t in (tables.where, tables.alias, tables.scales, tables.counts))),
            _PostList(
                *(t.data_ptr() for t in (self._tasks, self._pick_rows, self._pick_slots, self._num_tasks, self._by_cpu))
            ),
            _PostMail(*(mail.device(name) for name in ("box", "x", "tasks", "rows", "slots"))),
            router, memory.state, x_TH, self._codes, self._scales, memory.flags, part.activations, part.matrices,
            ops.ahead(_AHEAD_BYTES, blocks), shared=part.shared,
        )  # fmt: skip

    def _compute(self, x_TH: torch.Tensor) -> None:
        layout, shape, flags = self._layout, self._shape, self._memory.flags
        picks = self._rows * self._top_k
        if layout.format == "bf16":
            rows: tuple[torch.Tensor, ...] = (x_TH,)
            inner: tuple[torch.Tensor, ...] = (self._inner,)
        else:
            rows, inner = (self._codes, self._scales), (self._inner, self._inner_scales)
        one, other = gate_up_launch(shape), down_launch(shape)
        self._program.launch(
            f"expert.{layout.format}_gate_up", (one.blocks, picks), one.threads,
            shape, self._tasks, self._pick_rows, *rows, *inner, flags, self._num_tasks, shared=one.shared,
        )  # fmt: skip
        self._program.launch(
            f"expert.{layout.format}_down", (other.blocks, picks), other.threads,
            shape, self._tasks, self._pick_rows, self._pick_slots, *inner, self._parts, flags, self._num_tasks,
            shared=other.shared,
        )  # fmt: skip
