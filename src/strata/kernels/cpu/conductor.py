"""Binds the native thread that answers a GPU's decode rounds (``csrc/cpu/conductor.h``).

Lives here because it is the CPU's side of a round. Addresses of the mailbox's parts and the tables of all experts are
the caller's; tables are changed only between rounds and outlive the conductor. It must not know a tier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from strata.kernels.cpu.library import check, declare
from strata.quant.layout import ExpertLayout

__all__ = ["Conductor", "ConductorCounters", "FileTables", "RamTables"]

_FORMATS = {"nvfp4": 0, "q8_0": 1, "bf16": 2}
_FAULTS = {"sleep": 1, "die": 2, "abort": 3}
_KINDS = 8
LATE_MS = 10_000  # how long a round waits for the worker to come back from one that was given up


@dataclass(frozen=True)
class RamTables:
    """Of all L x E experts (flat): ``address`` uint64 (0: in the file alone), ``kind`` uint8 (below 8, counted),
    ``scales`` FP32 [L, E, 3]; ``checked`` uint8 and ``checksum`` uint64, or None: bytes whose ``checked`` is 0 are
    compared with the checksum before they are used."""

    address: npt.NDArray[np.uint64]
    kind: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    checked: npt.NDArray[np.uint8] | None = None
    checksum: npt.NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class FileTables:
    """Where experts lie in files: ``descriptor`` int32, ``offset`` int64; and ``buffers`` to read them into."""

    descriptor: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    buffers: int
    num_buffers: int
    stride: int


@dataclass(frozen=True)
class ConductorCounters:
    """Since the start. ``by_kind``: experts computed; ``settled``: exchanges that ``settle`` has waited for; seconds of
    polling in rounds and of computing."""

    exchanges: int
    file_reads: int
    restarts: int
    settled: int
    by_kind: tuple[int, ...]
    wait_seconds: float
    work_seconds: float


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mailbox", "x", "tasks", "rows", "slots", "out", "flags")),
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate", "format", "most_rows", "most_picks")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_experts")),
        *((name, ctypes.c_void_p) for name in ("address", "kind", "scales", "checked", "checksum", "file", "offset")),
        ("blob_bytes", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_buffers", "stride")),
    )


class _Counters(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("exchanges", "file_reads", "restarts", "settled")),
        ("by_kind", ctypes.c_int64 * _KINDS),
        *((name, ctypes.c_int64) for name in ("wait_ns", "work_ns")),
    )


@cache
def _function(name: str, *arguments: object) -> ctypes._NamedFuncPointer:
    returns = None if name in ("abort", "close", "fault", "counters") else ctypes.c_int
    return declare(f"strata_conductor_{name}", *arguments, returns=returns)


class Conductor:
    """One thread. ``begin`` before a round is launched, ``end`` when the device is done with it; ``close`` once."""

    def __init__(
        self,
        layout: ExpertLayout,
        parts: Mapping[str, int],
        most_rows: int,
        most_picks: int,
        ram: RamTables,
        file: FileTables | None = None,
    ) -> None:
        """``parts``: host addresses of the mailbox's box, x, tasks, rows, slots, out and flags."""
        num_layers, num_experts, _ = ram.scales.shape
        self._kept = (ram, file)  # native code reads these arrays

        def address(array: npt.NDArray[np.generic] | None) -> int | None:
            assert array is None or array.flags.c_contiguous, "native code reads whole arrays"
            return None if array is None else array.ctypes.data

        self._config = _Config(
            *(parts[name] for name in ("box", "x", "tasks", "rows", "slots", "out", "flags")),
            layout.hidden, layout.intermediate, _FORMATS[layout.format], most_rows, most_picks,
            num_layers, num_experts,
            address(ram.address), address(ram.kind), address(ram.scales), address(ram.checked), address(ram.checksum),
            address(file.descriptor) if file else None, address(file.offset) if file else None,
            layout.blob_bytes,
            file.buffers if file else None, file.num_buffers if file else 0, file.stride if file else 0,
        )  # fmt: skip
        self._handle = ctypes.c_void_p()
        opened = _function("open", ctypes.c_void_p, ctypes.c_void_p)
        check(opened(ctypes.byref(self._config), ctypes.byref(self._handle)))
        self._begin = _function("begin", ctypes.c_void_p, ctypes.c_int)
        self._end = _function("end", ctypes.c_void_p)
        self._settle = _function("settle", ctypes.c_void_p, ctypes.c_int)

    def begin(self, wait_ms: int = LATE_MS) -> None:
        """A round may post from now on. Raises ``EngineError`` if the thread is still busy after ``wait_ms``."""
        check(self._begin(self._handle, wait_ms))

    def end(self) -> None:
        """No round posts from now on. Raises ``EngineError`` with the words of a task of this round that failed."""
        check(self._end(self._handle))

    def settle(self, wait_ms: int) -> None:
        """For a host that hands a round over layer by layer: waits until what was posted is answered, or no answer will
        come any more. Raises ``EngineError`` if neither is so after ``wait_ms``."""
        check(self._settle(self._handle, wait_ms))

    def abort(self) -> None:
        """Sets the abort word: the running round waits for nobody any more."""
        _function("abort", ctypes.c_void_p)(self._handle)

    def plan_fault(self, kind: Literal["sleep", "die", "abort"], exchange: int, milliseconds: int = 0) -> None:
        """For tests: what goes wrong at the ``exchange``-th exchange (from 1) after the next ``begin``."""
        number = ctypes.c_int
        _function("fault", ctypes.c_void_p, number, number, number)(self._handle, _FAULTS[kind], exchange, milliseconds)

    def counters(self) -> ConductorCounters:
        found = _Counters()
        _function("counters", ctypes.c_void_p, ctypes.c_void_p)(self._handle, ctypes.byref(found))
        return ConductorCounters(
            found.exchanges, found.file_reads, found.restarts, found.settled, tuple(found.by_kind),
            found.wait_ns / 1e9, found.work_ns / 1e9,
        )  # fmt: skip

    def close(self) -> None:
        if self._handle:
            _function("close", ctypes.c_void_p)(self._handle)
            self._handle = ctypes.c_void_p()
