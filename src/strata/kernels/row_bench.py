"""Measures the native dense product against memory and against FMA: the figures of ``rows.json``.

Lives in ``kernels`` beside ``bench.py``, whose memory and sum it uses; ``benchmarks/rows.py`` prints what it returns.
Few rows are bound by the bytes of the weights: the ceiling is a plain sum over the same memory by the same threads.
Many rows are bound by arithmetic: the ceiling is FMA in registers. It must not know models or tiers.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from strata.benchmark_record import Figure, Record
from strata.errors import ConfigError
from strata.kernels.bench import huge_pages, machine
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.ops import CpuOps
from strata.kernels.ops import Matrix, MatrixFormat

__all__ = ["bench_rows", "matrices_in"]

FORMATS: tuple[MatrixFormat, ...] = ("bf16", "q8_0")


def matrices_in(memory: npt.NDArray[np.uint8], format: MatrixFormat, size: int) -> list[Matrix]:
    """Square matrices of ``size`` that fill ``memory``; their weights are finite, whatever they are."""
    codes = size * size * (1 if format == "q8_0" else 2)
    scales = size * size // 32 * 2 if format == "q8_0" else 0
    matrices = []
    for start in range(0, memory.size - codes - scales + 1, codes + scales):
        block = torch.from_numpy(memory[start : start + codes + scales])
        if format == "bf16":
            matrices.append(Matrix("bf16", block.view(torch.bfloat16).fill_(0.01).view(size, size), size))
            continue
        block[:codes].fill_(17)
        scale = block[codes:].view(torch.float16).fill_(0.001).view(size, size // 32)
        matrices.append(Matrix("q8_0", block[:codes].view(torch.int8).view(size, size), size, scale))
    return matrices


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _pass(ops: CpuOps, x: torch.Tensor, matrices: Sequence[Matrix]) -> float:
    started = time.perf_counter()
    for matrix in matrices:
        ops.linear(x, matrix)
    return time.perf_counter() - started


def _best(values: list[float], unit: str, ceiling: float, dense: str) -> Figure:
    return Figure(
        round(max(values), 2), unit, ceiling=round(ceiling, 2), min=round(min(values), 2),
        max=round(max(values), 2), runs=len(values), dense=dense,
    )  # fmt: skip


def _few_rows(
    ops: CpuOps, memory: npt.NDArray[np.uint8], format: MatrixFormat, size: int, repeats: int
) -> dict[str, Figure]:
    matrices = matrices_in(memory, format, size)
    nbytes = sum(matrix.nbytes for matrix in matrices)
    add = library.declare("strata_memory_sum", ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
    total = ctypes.c_uint64()
    inputs = {count: torch.randn(count, size) for count in (1, 4)}
    sums: list[float] = []
    rates: dict[int, list[float]] = {count: [] for count in inputs}
    for _ in range(repeats):
        took = _seconds(lambda: library.check(add(memory.ctypes.data, memory.size, ctypes.byref(total))))
        sums.append(memory.size / took / 1e9)
        for count, x in inputs.items():
            took = _pass(ops, x, matrices)
            rates[count].append(nbytes / took / 1e9)
    return {
        f"cpu_dense_{format}" + ("" if count == 1 else f"_{count}rows"): _best(values, "GB/s", max(sums), format)
        for count, values in rates.items()
    }


def _many_rows(ops: CpuOps, matrix: Matrix, rows: int, repeats: int, threads: int) -> Figure:
    spin = library.declare("strata_rows_fma_rounds", ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    done = ctypes.c_int64()
    x = torch.randn(rows, matrix.columns)
    peaks: list[float] = []
    rates: list[float] = []
    for _ in range(repeats):
        took = _seconds(lambda: library.check(spin(16 * threads, 400_000, ctypes.byref(done))))
        peaks.append(2 * done.value / took / 1e9)
        took = _seconds(lambda: ops.linear(x, matrix))
        rates.append(2 * rows * matrix.rows * matrix.columns / took / 1e9)
    return _best(rates, "GFLOP/s", max(peaks), matrix.format)


def bench_rows(
    *, gib: float = 1.0, threads: int | None = None, size: int = 2560, repeats: int = 5, command: str
) -> Record:
    """Rates of dense products over ``gib`` GiB of distinct matrices of ``size`` squared, best of ``repeats``.

    Figures ``cpu_dense_<format>`` (1 row) and ``_4rows`` in GB/s of weights, ``cpu_dense_<format>_512rows`` in GFLOP/s.
    (Re)starts the thread pool. Raises ``ConfigError`` for sizes that cannot be measured.
    """
    if size % 32 or gib * 2**30 < 4 * size * size or repeats < 1:
        raise ConfigError(
            f"{gib} GiB of matrices of {size}, {repeats} repeats", "use a multiple of 32 and room for two"
        )
    used = pool.configure(threads)
    ops = CpuOps()
    memory = huge_pages(int(gib * 2**30) // 4096 * 4096)
    figures: dict[str, Figure] = {}
    for format in FORMATS:
        figures |= _few_rows(ops, memory, format, size, repeats)
        matrix = matrices_in(memory, format, size)[0]
        figures[f"cpu_dense_{format}_512rows"] = _many_rows(ops, matrix, 512, repeats, used)
    return Record(command, machine() | {"threads": used, "weights_gib": gib, "size": size}, figures)
