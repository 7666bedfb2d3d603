"""Measures the native expert kernel against what memory gives: the figures of ``kernels.json``.

Lives in ``kernels`` because it drives them directly, on made-up experts; ``strata bench kernels`` and
``benchmarks/kernels.py`` print what it returns. The ceiling is a plain sum over the same bytes by the same threads.
It must not know models or tiers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from strata.benchmark_record import Figure, Record
from strata.errors import ConfigError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.experts import ExpertKernel, ExpertTasks, group_picks
from strata.quant import ExpertFormat, ExpertLayout

__all__ = ["EXPERTS_PER_CALL", "ExpertsInMemory", "bench_kernels", "kernel_pass", "machine"]

_HUGE = 2 << 20
EXPERTS_PER_CALL = 8
"""Experts of one call, about the picks of a token in one layer."""


def machine() -> dict[str, object]:
    """This machine in numbers: processor, instruction set, cores, RAM."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "isa": library.isa(), "cores": pool.default_threads(), "ram_gib": round(ram, 1)}


def huge_pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Anonymous memory that starts at a huge page and asks for them; freed with the array."""
    memory = mmap.mmap(-1, nbytes + _HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + nbytes]


class ExpertsInMemory:
    """Distinct copies of a few random experts that fill ``memory``."""

    def __init__(self, layout: ExpertLayout, memory: npt.NDArray[np.uint8]) -> None:
        self.layout = layout
        self.count = len(memory) // layout.blob_bytes
        self.blobs = memory[: self.count * layout.blob_bytes].reshape(self.count, -1)
        random = torch.Generator().manual_seed(0)
        wide, tall = (layout.intermediate, layout.hidden), (layout.hidden, layout.intermediate)
        blobs, scales = layout.pack_weights(
            *(torch.randn(EXPERTS_PER_CALL, *shape, generator=random) for shape in (wide, wide, tall))
        )
        for e in range(self.count):
            self.blobs[e] = blobs[e % EXPERTS_PER_CALL].numpy()
        self.scales = np.tile(scales.numpy(), (-(-self.count // EXPERTS_PER_CALL), 1))[: self.count]

    def calls(self, rows: int, count: int | None = None) -> list[ExpertTasks]:
        """Calls that together compute every expert (or the first ``count``) once, for ``rows`` rows."""
        addresses = (self.blobs.ctypes.data + np.arange(self.count) * self.layout.blob_bytes).astype(np.uint64)
        calls = []
        end = self.count if count is None else min(count, self.count)
        for first in range(0, end, EXPERTS_PER_CALL):
            here = np.arange(first, min(first + EXPERTS_PER_CALL, end), dtype=np.int32)
            tasks = group_picks(np.tile(here, (rows, 1)))
            tasks.place(addresses, self.scales)
            calls.append(tasks)
        return calls


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - started) / 1e9


def _sum(blobs: npt.NDArray[np.uint8]) -> Callable[[], object]:
    add = library.declare("strata_memory_sum", ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
    result = ctypes.c_uint64()
    return lambda: library.check(add(blobs.ctypes.data, blobs.size, ctypes.byref(result)))


def kernel_pass(
    experts: ExpertsInMemory, rows: int, calls: Sequence[ExpertTasks] | None = None
) -> Callable[[], object]:
    """A call that computes every expert once for ``rows`` rows, or what ``calls`` (of so many rows) say."""
    kernel = ExpertKernel(experts.layout)
    x = torch.randn(rows, experts.layout.hidden, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(rows * EXPERTS_PER_CALL, experts.layout.hidden)
    flags = np.zeros(rows, np.uint8)
    calls = experts.calls(rows) if calls is None else calls

    def run() -> None:
        for tasks in calls:
            kernel.compute(tasks, x, out, flags)

    return run


def bench_kernels(
    *,
    gib: float = 4.0,
    threads: int | None = None,
    rows: Sequence[int] = (1, 4),
    repeats: int = 5,
    format: ExpertFormat = "nvfp4",
    hidden: int = 2560,
    intermediate: int = 640,
    command: str = "strata bench kernels",
) -> Record:
    """Rates in GB/s of weights read, each expert of ``gib`` GiB once a pass, best of ``repeats`` interleaved passes.

    Figures ``cpu_expert_kernel`` (1 row), ``cpu_expert_kernel_4rows`` and so on, each with the ceiling: the best plain
    sum over the same bytes with the same threads; ``min`` and ``max`` are over the passes. (Re)starts the thread pool.
    Raises ``ConfigError`` if the experts do not fit in the RAM that is free.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    if not gib > 0 or repeats < 1 or not rows or min(rows) < 1:
        raise ConfigError(f"{gib} GiB, {repeats} repeats, rows {list(rows)}", "each must be above zero")
    if gib > free * 0.9:
        raise ConfigError(f"{gib:.1f} GiB of experts asked, {free:.1f} GiB of RAM are free", "pass a smaller --gib")
    used = pool.configure(threads)
    layout = ExpertLayout(hidden, intermediate, format)
    experts = ExpertsInMemory(layout, huge_pages(max(int(gib * 2**30), EXPERTS_PER_CALL * layout.blob_bytes)))
    read = experts.count * experts.layout.payload_bytes
    works = {"sum": (experts.blobs.size, _sum(experts.blobs))}
    works |= {str(count): (read, kernel_pass(experts, count)) for count in rows}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, (nbytes, work) in works.items():
            rates[name].append(_rate(nbytes, work))
    ceiling = max(rates.pop("sum"))
    figures = {
        "cpu_expert_kernel" + ("" if name == "1" else f"_{name}rows"): Figure(
            round(max(values), 2), "GB/s", ceiling=round(ceiling, 2), min=round(min(values), 2),
            max=round(max(values), 2), runs=len(values),
        )
        for name, values in rates.items()
    }  # fmt: skip
    details = {"threads": used, "experts_gib": round(experts.blobs.size / 2**30, 2), "format": format}
    return Record(command, machine() | details, figures)
