"""Measures the CPU's and the GPU's expert kernels reading page-locked RAM alone and at the same time.

Lives beside the GPU's kernel. The sum of both is a ceiling of decode when no expert is in VRAM. It must not know
models or tiers.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from strata.benchmark_record import Figure
from strata.errors import EngineError
from strata.kernels.bench import EXPERTS_PER_CALL, ExpertsInMemory, kernel_pass
from strata.kernels.cpu import pool
from strata.kernels.cuda.experts import CudaExpertKernel
from strata.quant import ExpertLayout

__all__ = ["bench_alias"]


def _ask(answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    if int(status) != 0:
        raise EngineError(f"a CUDA call of the benchmark failed: {status.name}")
    return results[0] if len(results) == 1 else results


class _Alias:
    """One page-locked, device-mapped allocation as a numpy array, and its address on the device."""

    def __init__(self, driver: Any, nbytes: int) -> None:
        self._driver = driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._host = int(_ask(driver.cuMemHostAlloc(nbytes, flags)))
        self.device = int(_ask(driver.cuMemHostGetDevicePointer(self._host, 0)))
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._host))

    def free(self) -> None:
        self._driver.cuMemFreeHost(self._host)


def _gpu_pass(driver: Any, experts: ExpertsInMemory, device: int, architecture: int, rows: int) -> Callable[[], None]:
    """A call that computes every expert once on the GPU through the alias, and waits."""
    layout = experts.layout
    kernel = CudaExpertKernel(layout, architecture)
    size = kernel.scratch(rows, rows * EXPERTS_PER_CALL)

    def zeros(nbytes: int) -> int:
        address = _ask(driver.cuMemAlloc(nbytes))
        _ask(driver.cuMemsetD8(address, 0, nbytes))
        return int(address)

    def put(array: np.ndarray) -> int:
        address = zeros(array.nbytes)
        _ask(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    codes, factors, flags = zeros(size.row_codes), zeros(size.row_scales), zeros(rows)
    inner, inner_factors = zeros(size.pick_codes), zeros(size.pick_scales)
    out = zeros(rows * EXPERTS_PER_CALL * layout.hidden * 4)
    x = np.random.default_rng(0).standard_normal((rows, layout.hidden)).astype(np.float32)
    kernel.quantise(put(x), rows, codes, factors, flags)
    calls = []
    for tasks in experts.calls(rows):
        moved = tasks.tasks.copy()
        moved["blob"] += np.uint64(device) - np.uint64(experts.blobs.ctypes.data)
        calls.append((put(moved.view(np.uint8)), len(moved), put(tasks.rows), put(tasks.slots)))

    def run() -> None:
        for task, count, row, slot in calls:
            kernel.compute(task, count, row, slot, codes, factors, inner, inner_factors, out, flags)
        _ask(driver.cuCtxSynchronize())

    return run


def _rate(work: Callable[[], object], nbytes: int, seconds: float) -> float:
    """GB/s of passes repeated for at least ``seconds``."""
    work()
    started, passes = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        work()
        passes += 1
    return passes * nbytes / (time.perf_counter() - started) / 1e9


def bench_alias(
    *, gib: float = 4.0, threads: int | None = None, rows: int = 1, seconds: float = 2.0, repeats: int = 3
) -> dict[str, Figure]:
    """Figures ``cpu_beside_alias``, ``alias_expert_kernel`` (each alone) and ``cpu_and_alias_together``, GB/s.

    ``gib`` GiB of page-locked experts, half read by each side. Uses the first card. Raises ``EngineError``.
    """
    from cuda.bindings import driver

    _ask(driver.cuInit(0))
    device = _ask(driver.cuDeviceGet(0))
    context = _ask(driver.cuDevicePrimaryCtxRetain(device))
    _ask(driver.cuCtxSetCurrent(context))
    kind = driver.CUdevice_attribute
    major = _ask(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = _ask(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    pool.configure(threads)
    layout = ExpertLayout(2560, 640, "nvfp4")
    half = int(gib * 2**29) // layout.blob_bytes * layout.blob_bytes
    alias = _Alias(driver, 2 * half)
    sides = [ExpertsInMemory(layout, alias.bytes[:half]), ExpertsInMemory(layout, alias.bytes[half:])]
    on_cpu = kernel_pass(sides[0], rows)
    on_gpu = _gpu_pass(driver, sides[1], alias.device + half, major * 10 + minor, rows)
    rates: dict[str, list[float]] = {"cpu_beside_alias": [], "alias_expert_kernel": [], "cpu_and_alias_together": []}

    def beside(found: list[float]) -> None:
        _ask(driver.cuCtxSetCurrent(context))
        found.append(_rate(on_gpu, half, seconds))

    for _ in range(repeats):
        rates["cpu_beside_alias"].append(_rate(on_cpu, half, seconds))
        rates["alias_expert_kernel"].append(_rate(on_gpu, half, seconds))
        found: list[float] = []
        other = threading.Thread(target=beside, args=(found,))
        other.start()
        mine = _rate(on_cpu, half, seconds)
        other.join()
        rates["cpu_and_alias_together"].append(mine + sum(found))
    alias.free()
    return {
        name: Figure(round(max(v), 2), "GB/s", min=round(min(v), 2), max=round(max(v), 2), runs=len(v))
        for name, v in rates.items()
    }
