"""The exact expert kernel on an NVIDIA GPU: compiled for the card at run time, launched on a stream.

Lives beside its source, ``expert.cu``, which shares ``quant/exact.h`` with the CPU: both give the same bits. Blobs
are read where the tasks' addresses point, in VRAM or through the alias of page-locked RAM. It must not know which.
All addresses are integers; memory belongs to the caller.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from strata.errors import EngineError
from strata.kernels.cuda.compile import KernelSource, compile_source
from strata.quant.layout import ExpertLayout

__all__ = ["CudaExpertKernel", "ExpertLaunch", "ExpertScratch", "Shape", "down_launch", "gate_up_launch", "shape_of"]

_ROWS_AT_ONCE = 4
_PLAIN_SHARED = 48 << 10  # bytes of dynamic shared memory that a block gets without asking
_LEAST_WARPS, _MOST_WARPS = 2, 10  # the kernels are compiled for 320 threads at most
# Units (segments of a pair of groups) that a warp takes one after the other. Flash-Next's gate and up are then 400
# blocks of 5 warps for 10 experts, of which 4 fit a multiprocessor: one wave on an H200's 132.
_UNITS_OF_GATE_UP_WARP, _UNITS_OF_DOWN_WARP = 4, 2
_MOST_DOWN_SEGMENTS = 8  # above them a block of down takes one pair of groups, else two


class Shape(ctypes.Structure):
    """``Shape`` of expert.cu: widths, superblocks of a row of gate and up, and of down, and the pairs of groups of 16
    rows of down that a block computes."""

    _fields_ = [(name, ctypes.c_int) for name in ("hidden", "intermediate", "wide", "narrow", "pairs")]


@dataclass(frozen=True)
class ExpertLaunch:
    """``blocks`` of a task, ``threads`` of a block, ``shared`` bytes of its dynamic shared memory."""

    blocks: int
    threads: int
    shared: int


@dataclass(frozen=True)
class ExpertScratch:
    """Device memory of a call, in bytes: codes and scales of T rows, and of P picks. Pick memory starts as zeros."""

    row_codes: int
    row_scales: int
    pick_codes: int
    pick_scales: int


def _ask(answer: tuple[Any, ...], doing: str) -> Any:
    """The result of a CUDA call. Raises ``EngineError`` that says what was being done."""
    status, *results = answer
    if int(status) != 0:
        raise EngineError(f"{doing} failed: {status.name}", "see the driver's log; STRATA's CPU path needs no GPU")
    return results[0] if len(results) == 1 else results


@cache
def _image(architecture: int) -> bytes:
    """Machine code of expert.cu for a compute capability such as 90."""
    return compile_source(KernelSource.read("expert"), architecture)


class CudaExpertKernel:
    """Computes experts of one layout on the current context's device. Formats: nvfp4 and q8_0."""

    def __init__(self, layout: ExpertLayout, architecture: int) -> None:
        from cuda.bindings import driver

        if layout.format not in ("nvfp4", "q8_0"):
            raise EngineError(f"the GPU kernel does not read {layout.format} experts", "pack them as nvfp4 or q8_0")
        self.layout = layout
        self._driver = driver
        self._module = _ask(driver.cuModuleLoadData(_image(architecture)), "loading expert.cu")
        self._functions = {
            name: _ask(driver.cuModuleGetFunction(self._module, symbol.encode()), f"finding {symbol}")
            for name, symbol in (
                ("quantise", "quantise_rows"),
                ("gate_up", f"{layout.format}_gate_up"),
                ("down", f"{layout.format}_down"),
                ("combine", "combine_parts"),
            )
        }
        self._shape = shape_of(layout)
        for name, launch in (("gate_up", gate_up_launch(self._shape)), ("down", down_launch(self._shape))):
            if launch.shared > _PLAIN_SHARED:
                kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                answer = driver.cuFuncSetAttribute(self._functions[name], kind, launch.shared)
                _ask(answer, f"asking for shared memory of the expert kernel's {name}")

    def scratch(self, rows: int, picks: int) -> ExpertScratch:
        """Bytes of the four scratch buffers of a call."""
        wide, narrow = self._shape.wide * 64, self._shape.narrow * 64
        return ExpertScratch(rows * wide, rows * wide // 4, picks * narrow, picks * narrow // 4)

    def quantise(self, x: int, rows: int, codes: int, scales: int, flags: int, stream: int = 0) -> None:
        """FP32 rows at ``x`` to codes and scales; sets flags of rows that are not finite."""
        width = self._shape.wide * 64
        arguments = ((x, self.layout.hidden, width, codes, scales, flags), _types("pi ippp"))
        self._launch("quantise", (rows, 1), min(1024, width), 0, arguments, stream)

    def compute(
        self, tasks: int, num_tasks: int, rows: int, slots: int, codes: int, scales: int, inner: int,
        inner_scales: int, out: int, flags: int, stream: int = 0,
    ) -> None:  # fmt: skip
        """Computes ``num_tasks`` tasks (device memory, ``TASK`` of kernels/cpu/experts.py) for their picks.

        ``rows`` and ``slots`` are the picks (int32), ``codes`` and ``scales`` what ``quantise`` wrote, ``inner`` and
        ``inner_scales`` pick scratch, ``out`` FP32 rows of H, ``flags`` bytes a row. Ordered on the stream.
        """
        shape = self._shape
        one, other = gate_up_launch(shape), down_launch(shape)
        values = (shape, tasks, rows, codes, scales, inner, inner_scales, flags, 0)
        types = (None, *_types("pppppppp"))
        self._launch("gate_up", (one.blocks, num_tasks), one.threads, one.shared, (values, types), stream)
        values = (shape, tasks, rows, slots, inner, inner_scales, out, flags, 0)
        self._launch("down", (other.blocks, num_tasks), other.threads, other.shared, (values, types), stream)

    def combine(self, parts: int, weights: int, rows: int, k: int, y: int, flags: int, stream: int = 0) -> None:
        """y[row] = sum over k in order of weights[row, k] * parts[row, k]."""
        hidden = self.layout.hidden
        arguments = ((parts, weights, k, hidden, y, flags), _types("pp iipp"))
        self._launch("combine", (rows, -(-hidden // 256)), 256, 0, arguments, stream)

    def _launch(
        self, name: str, grid: tuple[int, int], threads: int, shared: int, arguments: tuple[Any, ...], stream: int
    ) -> None:
        launch = self._driver.cuLaunchKernel
        answer = launch(self._functions[name], *grid, 1, threads, 1, 1, shared, stream, arguments, 0)
        _ask(answer, f"launching the expert kernel's {name}")


def _types(letters: str) -> tuple[Any, ...]:
    return tuple(ctypes.c_void_p if letter == "p" else ctypes.c_int for letter in letters if letter != " ")


def shape_of(layout: ExpertLayout) -> Shape:
    narrow = -(-layout.intermediate // 64)
    pairs = 1 if (narrow + 1) // 2 > _MOST_DOWN_SEGMENTS else 2
    return Shape(layout.hidden, layout.intermediate, -(-layout.hidden // 64), narrow, pairs)


def gate_up_launch(shape: Shape) -> ExpertLaunch:
    """Blocks of 16 columns of gate and of up."""
    return _launch_of(-(-shape.intermediate // 16), 1, shape.wide, _UNITS_OF_GATE_UP_WARP)


def down_launch(shape: Shape) -> ExpertLaunch:
    """Blocks of ``shape.pairs`` times 32 columns of down."""
    return _launch_of(-(-shape.hidden // (32 * shape.pairs)), shape.pairs, shape.narrow, _UNITS_OF_DOWN_WARP)


def _launch_of(blocks: int, pairs: int, superblocks: int, units_of_warp: int) -> ExpertLaunch:
    units = pairs * ((superblocks + 1) // 2)
    warps = max(_LEAST_WARPS, min(_MOST_WARPS, -(-units // units_of_warp)))
    return ExpertLaunch(blocks, 32 * warps, _shared(superblocks, units))


def _shared(superblocks: int, units: int) -> int:
    """Bytes of ``Room`` of expert.cu: zeros, codes and scales of four rows, 32 sums of each unit and row."""
    pitch = superblocks | 1
    return 256 + _ROWS_AT_ONCE * (pitch * (64 + 16) + units * 32 * 4)
