"""Groups a layer's picks by expert and finds where each is read from, in one native call (``csrc/cpu/picks.h``).

Lives beside the expert kernel, whose ``ExpertTasks`` it fills. The tables belong to the caller, who may change them
between calls but never replaces them. It must not know what a kind of place means.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.kernels.cpu.experts import TASK, ExpertTasks
from strata.kernels.cpu.library import check, declare

__all__ = ["GroupedPicks", "PickTables", "Placements"]

NUM_KINDS = 8


class _Tables(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot_of", "stamp_of", "generation", "owner")),
        *((name, ctypes.c_void_p) for name in ("fallback_kind", "fallback", "scales", "counts")),
        *((name, ctypes.c_uint64) for name in ("slots_address", "stride")),
        *((name, ctypes.c_int64) for name in ("num_slots", "num_experts", "num_layers")),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tasks", "experts", "rows", "places", "kinds")),
        ("by_kind", ctypes.c_int64 * NUM_KINDS),
        ("num_tasks", ctypes.c_int64),
        ("num_stale", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Placements:
    """The tables of all L x E experts (flat) and all S slots. ``kind`` 0 is a slot, others are the caller's.

    ``slot_of`` int32 [L*E], ``stamp_of`` int64 [L*E], ``generation`` and ``owner`` int64 [S], ``fallback_kind`` uint8
    [L*E], ``fallback`` uint64 [L*E] (0: no address), ``scales`` FP32 [L, E, 3]; slots are ``stride`` bytes apart.
    """

    slot_of: NDArray[np.int32]
    stamp_of: NDArray[np.int64]
    generation: NDArray[np.int64]
    owner: NDArray[np.int64]
    fallback_kind: NDArray[np.uint8]
    fallback: NDArray[np.uint64]
    scales: NDArray[np.float32]
    slots_address: int
    stride: int


@dataclass(frozen=True, eq=False)
class GroupedPicks:
    """One layer's tasks with blobs and scales in place; valid until the next ``group``. ``kinds`` uint8 [tasks]."""

    tasks: ExpertTasks
    kinds: NDArray[np.uint8]
    by_kind: tuple[int, ...]
    num_stale: int


class PickTables:
    """Owns the output arrays and ``counts`` int64 [L, E]: rows that picked each expert. One thread uses it."""

    def __init__(self, placements: Placements) -> None:
        num_layers, num_experts, _ = placements.scales.shape
        self._placements = placements  # keeps the arrays that native code reads
        self.counts: NDArray[np.int64] = np.zeros((num_layers, num_experts), np.int64)
        for table in (*vars(placements).values(), self.counts):
            assert not isinstance(table, np.ndarray) or table.flags.c_contiguous, "native code reads whole arrays"
        self._tables = _Tables(
            placements.slot_of.ctypes.data,
            placements.stamp_of.ctypes.data,
            placements.generation.ctypes.data,
            placements.owner.ctypes.data,
            placements.fallback_kind.ctypes.data,
            placements.fallback.ctypes.data,
            placements.scales.ctypes.data,
            self.counts.ctypes.data,
            placements.slots_address,
            placements.stride,
            len(placements.owner),
            num_experts,
            num_layers,
        )
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._call = declare("strata_group_picks", pointer, number, pointer, number, number, pointer)
        self._room = 0
        self._result = _Result()
        self._reserve(64)

    def group(self, layer: int, ids_TK: NDArray[np.int32]) -> GroupedPicks:
        """Groups ``ids_TK`` (contiguous int32). Raises ``EngineError`` for an id out of range."""
        assert ids_TK.dtype == np.int32, "ids are int32"
        assert ids_TK.flags.c_contiguous, "ids are contiguous"
        num_rows, top_k = ids_TK.shape
        num_picks = num_rows * top_k
        if num_picks > self._room:
            self._reserve(num_picks)
        result = self._result
        check(self._call(ctypes.byref(self._tables), layer, ids_TK.ctypes.data, num_rows, top_k, ctypes.byref(result)))
        count = result.num_tasks
        tasks = ExpertTasks(
            self._experts[:count], self._tasks[:count], self._rows[:num_picks], self._places[:num_picks]
        )
        return GroupedPicks(tasks, self._kinds[:count], tuple(result.by_kind), result.num_stale)

    def _reserve(self, num_picks: int) -> None:
        self._room = num_picks
        self._tasks = np.zeros(num_picks, TASK)
        self._experts, self._rows, self._places = (np.zeros(num_picks, np.int32) for _ in range(3))
        self._kinds = np.zeros(num_picks, np.uint8)
        result = self._result
        result.tasks, result.kinds = self._tasks.ctypes.data, self._kinds.ctypes.data
        result.experts, result.rows, result.places = (
            array.ctypes.data for array in (self._experts, self._rows, self._places)
        )
