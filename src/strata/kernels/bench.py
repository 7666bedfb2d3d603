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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from strata.benchmark_record import Figure, Record
from strata.errors import ConfigError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.experts import ExpertKernel, ExpertTasks, group_picks
from strata.quant import ExpertFormat, ExpertLayout

__all__ = ["EXPERTS_PER_CALL", "ExpertsInMemory", "bench_kernels", "describe", "kernel_pass", "machine"]

_HUGE = 2 << 20
_GIB = 1 << 30
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


def _measure(experts: ExpertsInMemory, kernels: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Figure]:
    """The figures of ``bench_kernels`` but for names that the caller gives."""
    bytes_of = experts.blobs.reshape(-1)
    sums = {"plain_sum": bytes_of} | ({"plain_sum_1gib": bytes_of[:_GIB]} if bytes_of.size > _GIB else {})
    works = {name: (memory.size, _sum(memory)) for name, memory in sums.items()}
    works |= {name: (experts.count * experts.layout.payload_bytes, work) for name, work in kernels.items()}
    rates: dict[str, list[float]] = {name: [] for name in works}
    busy = {name: np.zeros(pool.threads()) for name in works}
    with pool.measure_busy() as seconds:
        for _ in range(repeats):
            for name, (nbytes, work) in works.items():
                before = np.array(seconds())
                rates[name].append(_rate(nbytes, work))
                busy[name] += np.array(seconds()) - before
    best = {name: round(max(values), 2) for name, values in rates.items()}
    figures = {}
    for name, values in rates.items():
        ceiling = best["plain_sum"] if name in kernels else None
        least = round(min(values), 2)
        figures[name] = Figure(best[name], "GB/s", ceiling=ceiling, min=least, max=best[name], runs=repeats)
    for name in kernels:
        share = 100 * busy[name] / busy[name].mean()
        for end, value in (("least", share.min()), ("most", share.max())):
            figures[f"{name}_{end}_busy"] = Figure(round(float(value), 1), "% of the mean thread", runs=repeats)
    return figures


def describe(record: Record) -> list[str]:
    """A line for each figure."""
    lines = []
    for name, figure in record.figures.items():
        share = f", {figure.percent} % of a plain sum's {figure.ceiling:.2f}" if figure.ceiling else ""
        lines.append(f"{name}: {figure.value:.2f} {figure.unit}{share}")
    return lines


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
    sum over the same bytes with the same threads, which is ``plain_sum``. ``plain_sum_1gib`` is that of the first GiB,
    because on some machines it depends on the size. ``min`` and ``max`` are over the passes. ``<kernel>_least_busy``
    and ``_most_busy``: how long the least and the most busy thread worked in all passes of a kernel, in percent of the
    mean. (Re)starts the thread pool. Raises ``ConfigError`` if the experts do not fit in the RAM that is free.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    if not gib > 0 or repeats < 1 or not rows or min(rows) < 1:
        raise ConfigError(f"{gib} GiB, {repeats} repeats, rows {list(rows)}", "each must be above zero")
    if gib > free * 0.9:
        raise ConfigError(f"{gib:.1f} GiB of experts asked, {free:.1f} GiB of RAM are free", "pass a smaller --gib")
    used = pool.configure(threads)
    layout = ExpertLayout(hidden, intermediate, format)
    count = max(-(-int(gib * 2**30) // layout.blob_bytes), EXPERTS_PER_CALL)  # no less than was asked
    experts = ExpertsInMemory(layout, huge_pages(count * layout.blob_bytes))
    kernels = {"cpu_expert_kernel" + ("" if n == 1 else f"_{n}rows"): kernel_pass(experts, n) for n in rows}
    figures = _measure(experts, kernels, repeats)
    details = {"threads": used, "experts_gib": round(experts.blobs.size / 2**30, 2), "format": format}
    return Record(command, machine() | details, figures)
