"""The exact expert kernel on an NVIDIA GPU: compiled for the card at run time, launched on a stream.

Lives beside its source, ``expert.cu``, which shares ``quant/exact.h`` with the CPU: both give the same bits. Blobs
are read where the tasks' addresses point, in VRAM or through the alias of page-locked RAM. It must not know which.
All addresses are integers; memory belongs to the caller.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strata.errors import EngineError
from strata.quant.layout import ExpertLayout

__all__ = ["CudaExpertKernel", "ExpertScratch", "Shape", "block_of", "shape_of"]

_SOURCE = Path(__file__).with_name("expert.cu")
_HEADER = Path(__file__).resolve().parents[2] / "quant" / "exact.h"
_ROWS_AT_ONCE = 4
_MOST_WARPS = 24  # 768 threads a block: two blocks fit a multiprocessor


class Shape(ctypes.Structure):
    """``Shape`` of expert.cu: widths, and superblocks of a row of gate and up, and of down."""

    _fields_ = [(name, ctypes.c_int) for name in ("hidden", "intermediate", "wide", "narrow")]


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
    from cuda.bindings import nvrtc

    source, header = _SOURCE.read_bytes(), _HEADER.read_bytes()
    program = _ask(nvrtc.nvrtcCreateProgram(source, b"expert.cu", 1, [header], [b"exact.h"]), "reading expert.cu")
    options = [f"--gpu-architecture=sm_{architecture}".encode(), b"--std=c++17", b"--fmad=false"]
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status) != 0:
            size = _ask(nvrtc.nvrtcGetProgramLogSize(program), "reading the compiler's log")
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            first = log.decode("utf-8", "replace").strip().splitlines()
            raise EngineError(f"expert.cu does not compile for sm_{architecture}: {first[0] if first else status}")
        image: bytes = b" " * _ask(nvrtc.nvrtcGetCUBINSize(program), "reading the machine code's size")
        _ask(nvrtc.nvrtcGetCUBIN(program, image), "reading the machine code")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image


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
        shape, blobs = self._shape, ((self.layout.intermediate + 15) // 16, (self.layout.hidden + 15) // 16)
        threads, shared = block_of(shape.wide)
        values = (shape, tasks, rows, codes, scales, inner, inner_scales, flags, 0)
        self._launch("gate_up", (blobs[0], num_tasks), threads, shared, (values, (None, *_types("pppppppp"))), stream)
        threads, shared = block_of(shape.narrow)
        down = (shape, tasks, rows, slots, inner, inner_scales, out, flags, 0)
        self._launch("down", (blobs[1], num_tasks), threads, shared, (down, (None, *_types("pppppppp"))), stream)

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
    return Shape(layout.hidden, layout.intermediate, -(-layout.hidden // 64), -(-layout.intermediate // 64))


def block_of(superblocks: int) -> tuple[int, int]:
    """Threads of a block and bytes of its shared memory: a warp a segment, two warps at least."""
    segments = (superblocks + 1) // 2
    return 32 * max(2, min(segments, _MOST_WARPS)), segments * _ROWS_AT_ONCE * 16 * 4
