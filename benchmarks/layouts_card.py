"""Layouts of scales and rules of summing on a card, each beside a plain reading of the same memory: layouts-card.json.

    python benchmarks/layouts_card.py --machine h200

Gate and up of NVFP4 experts of 2,560 x 640 for one row, from VRAM and from page-locked RAM, in the four ways of
``layouts_card.cu``: scales beside their codes or apart, FP32 sums in the fixed order or integer sums in any order.
Every way is checked against float64 first. Prints a table, then one JSON line. Needs an NVIDIA card and no model.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strata.benchmark_record import Figure, Record, record_path
from strata.errors import EngineError, StrataError
from strata.kernels.bench import machine
from strata.kernels.cpu.packing import pack_weights
from strata.kernels.cuda.compile import KernelSource, compile_source
from strata.kernels.cuda.device import pack_arguments
from strata.kernels.cuda.driver import CudaContext, ask, open_context
from strata.kernels.cuda.program import Address, Argument
from strata.quant import ExpertLayout

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LAYOUTS, SUMS = ("beside", "apart"), ("in_order", "any_order")
KINDS = 8  # experts that differ; the memory holds distinct copies of them
SECONDS_OF_PASS = 0.02  # a pass is so many readings of the experts that it takes about this long
# Of the sum of magnitudes: FP32 in segments of eight blocks, and one rounding of an exact sum.
TOLERANCE = {"in_order": 4e-6, "any_order": 1e-6}


def kernel_source() -> KernelSource:
    """``layouts_card.cu`` with the package's headers."""
    headers = KernelSource.read("expert").headers
    return KernelSource("layouts_card", (HERE / "layouts_card.cu").read_bytes(), headers)


@dataclass(frozen=True)
class Row:
    """One row of activations as both rules take it. ``scales`` FP32 and ``wholes`` int32, one a group of 16."""

    values: NDArray[np.float64]
    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    wholes: NDArray[np.int32]
    unit: float  # what an integer sum is multiplied by

    @classmethod
    def of(cls, x: NDArray[np.float32]) -> Row:
        groups = x.reshape(-1, 16)
        largest = np.abs(groups).max(-1)
        codes = np.rint(groups * (np.float32(127) / largest)[:, None]).astype(np.int8)
        scales = largest / np.float32(127)
        exponent = int(np.frexp(scales.max())[1]) - 15
        wholes = np.minimum(np.rint(np.ldexp(scales, -exponent)), 32767).astype(np.int32)
        values = codes.astype(np.float64) * scales.astype(np.float64)[:, None]
        return cls(values.reshape(-1), codes.reshape(-1), scales, wholes, 2.0 ** (exponent - 10))

    def of_wholes(self) -> NDArray[np.float64]:
        """The activations that integer sums take: scales cut to 15 bits below the largest."""
        return (self.codes.reshape(-1, 16) * (self.wholes * self.unit * 1024)[:, None]).reshape(-1)


@dataclass(frozen=True)
class Experts:
    """Gate and up of ``KINDS`` random experts. ``bytes_of``: uint8 [KINDS, stride] of each layout."""

    wide: int
    groups: int
    bytes_of: dict[str, NDArray[np.uint8]]
    scales: NDArray[np.float32]  # [KINDS, 2]
    weights: NDArray[np.float64]  # [KINDS, 2, groups * 16, wide * 64]

    @classmethod
    def make(cls, hidden: int, intermediate: int) -> Experts:
        assert hidden % 128 == 0, hidden
        assert intermediate % 16 == 0, intermediate
        layout = ExpertLayout(hidden, intermediate, "nvfp4")
        random = torch.Generator().manual_seed(0)
        shapes = ((KINDS, intermediate, hidden), (KINDS, intermediate, hidden), (KINDS, hidden, intermediate))
        blobs, scales = pack_weights(layout, *(torch.randn(shape, generator=random) for shape in shapes))
        gate, up, _ = layout.dequantise(blobs, scales)
        beside = blobs[:, : layout.down_offset].numpy()
        wide, groups = hidden // 64, intermediate // 16
        matrices = beside.reshape(KINDS, groups, 2, wide, 576).transpose(0, 2, 1, 3, 4)
        parts = [matrices[..., :512].reshape(KINDS, 2, -1), matrices[..., 512:].reshape(KINDS, 2, -1)]
        apart = np.concatenate(parts, -1).reshape(KINDS, -1)
        weights = torch.stack([gate, up], 1).double().numpy()
        return cls(wide, groups, {"beside": beside, "apart": apart}, scales[:, :2].numpy(), weights)

    @property
    def stride(self) -> int:
        return int(self.bytes_of["beside"].shape[1])


@dataclass(frozen=True)
class Shape:
    grid: tuple[int, int]
    threads: int
    shared: int


def launch_of(experts: Experts, count: int) -> Shape:
    """As gate and up of expert.cu: a block a group, four segments a warp."""
    segments = experts.wide // 2
    warps = max(2, min(10, -(-segments // 4)))
    sums = max(segments * 32 * 4, warps * 32 * 8)
    return Shape((experts.groups, count), 32 * warps, 256 + experts.wide * (64 + 16) + sums)


def arguments(
    experts: Experts, row: Row, sums: str, memory: Argument, codes: Argument, factors: Argument, scales: Argument,
    out: Argument,
) -> tuple[Argument, ...]:  # fmt: skip
    """What a kernel takes; ``factors`` holds the row's scales or, for sums in any order, its wholes."""
    unit = row.unit if sums == "any_order" else 0.0
    return (memory, Address(experts.stride), experts.wide, experts.groups, codes, factors, scales, unit, out)


def check(experts: Experts, row: Row, sums: str, kind: int, found: NDArray[np.float32]) -> float:
    """Compares one expert's gate and up, [2, columns], with float64. Returns the relative error of the whole against
    the row itself. Raises ``EngineError``."""
    weights = experts.weights[kind]
    taken = row.of_wholes() if sums == "any_order" else row.values
    wrong = np.abs(found - weights @ taken) > TOLERANCE[sums] * (np.abs(weights) @ np.abs(taken))
    if wrong.any():
        raise EngineError(f"sums {sums} of expert {kind}: {int(wrong.sum())} of {wrong.size} columns are wrong")
    exact = weights @ row.values
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


class Card:
    """Memory, kernels and the clock of the first card. Everything is freed with ``close``."""

    def __init__(self, context: CudaContext) -> None:
        self.context, self.driver = context, context.driver
        image = compile_source(kernel_source(), context.card.architecture)
        self._module = ask(self.driver.cuModuleLoadData(image), "loading layouts_card.cu")
        self._free: list[Callable[[], object]] = [lambda: self.driver.cuModuleUnload(self._module)]
        self._functions: dict[str, Any] = {}

    def take(self, nbytes: int) -> int:
        address = ask(self.driver.cuMemAlloc(nbytes), f"taking {nbytes:,} bytes of VRAM")
        self._free.append(lambda: self.driver.cuMemFree(address))
        return int(address)

    def put(self, array: NDArray[Any]) -> int:
        address = self.take(array.nbytes)
        self.copy_to(address, np.ascontiguousarray(array))
        return address

    def copy_to(self, address: int, array: NDArray[Any]) -> None:
        ask(self.driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes), "copying to the card")

    def get(self, address: int, count: int) -> NDArray[np.float32]:
        found = np.empty(count, np.float32)
        ask(self.driver.cuMemcpyDtoH(found.ctypes.data, address, found.nbytes), "copying from the card")
        return found

    def take_locked(self, nbytes: int) -> tuple[NDArray[np.uint8], int]:
        """Page-locked RAM and its address on the card."""
        flags = self.driver.CU_MEMHOSTALLOC_PORTABLE | self.driver.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(ask(self.driver.cuMemHostAlloc(nbytes, flags), f"taking {nbytes:,} bytes of page-locked RAM"))
        self._free.append(lambda: self.driver.cuMemFreeHost(host))
        device = int(ask(self.driver.cuMemHostGetDevicePointer(host, 0), "addressing page-locked RAM"))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host)), device

    def launcher(self, name: str, shape: Shape, values: tuple[Argument, ...]) -> Callable[[], None]:
        if name not in self._functions:
            found = self.driver.cuModuleGetFunction(self._module, name.encode())
            self._functions[name] = ask(found, f"finding {name}")
        packed = pack_arguments(values)

        def launch() -> None:
            answer = self.driver.cuLaunchKernel(
                self._functions[name], *shape.grid, 1, shape.threads, 1, 1, shape.shared, 0, packed.address, 0
            )
            ask(answer, f"launching {name}")

        return launch

    def seconds(self, launch: Callable[[], None], times: int) -> float:
        """Of ``times`` launches, on the card's clock."""
        marks = [ask(self.driver.cuEventCreate(0), "making an event") for _ in range(2)]
        ask(self.driver.cuEventRecord(marks[0], 0), "recording an event")
        for _ in range(times):
            launch()
        ask(self.driver.cuEventRecord(marks[1], 0), "recording an event")
        ask(self.driver.cuEventSynchronize(marks[1]), "waiting for the card")
        took = float(ask(self.driver.cuEventElapsedTime(*marks), "reading the card's clock")) / 1000
        for mark in marks:
            self.driver.cuEventDestroy(mark)
        return took

    def close(self) -> None:
        while self._free:
            self._free.pop()()


def best_rates(card: Card, launches: dict[str, Callable[[], None]], nbytes: int, repeats: int) -> dict[str, Figure]:
    """GB/s of each, the best of ``repeats`` passes that take turns."""
    times = {}
    for name, launch in launches.items():
        card.seconds(launch, 1)
        times[name] = max(1, min(200, round(SECONDS_OF_PASS / card.seconds(launch, 1))))
    rates: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(repeats):
        for name, launch in launches.items():
            rates[name].append(times[name] * nbytes / card.seconds(launch, times[name]) / 1e9)
    return {
        name: Figure(round(max(v), 1), "GB/s", min=round(min(v), 1), max=round(max(v), 1), runs=repeats)
        for name, v in rates.items()
    }


def measure(card: Card, gib: float, repeats: int) -> dict[str, Figure]:
    """Figures ``<place>_<layout>_<sums>`` with the ceiling ``<place>_plain_read``, and the errors of both rules."""
    experts, row = Experts.make(2560, 640), Row.of(np.random.default_rng(1).standard_normal(2560).astype(np.float32))
    count = max(KINDS, -(-int(gib * 2**30) // experts.stride))
    shape, nbytes, columns = launch_of(experts, count), count * experts.stride, experts.groups * 32
    scales = card.put(np.resize(experts.scales, (count, 2)))
    codes, out = card.put(row.codes), card.take(count * columns * 4)
    factors = {"in_order": card.put(row.scales), "any_order": card.put(row.wholes)}
    blocks = 8 * card.context.card.multiprocessors
    seen = card.take(blocks * 256 * 4)
    memories: dict[str, dict[str, int]] = {"vram": {}, "locked": {}}
    for layout in LAYOUTS:
        host, memories["locked"][layout] = card.take_locked(nbytes)
        for number in range(count):
            host[number * experts.stride : (number + 1) * experts.stride] = experts.bytes_of[layout][number % KINDS]
        memories["vram"][layout] = card.take(nbytes)
        card.copy_to(memories["vram"][layout], host)
    figures: dict[str, Figure] = {}
    errors: dict[str, float] = {}
    for place, memory in memories.items():
        read = (Address(memory["beside"]), Address(nbytes // 16), Address(seen))
        launches = {f"{place}_plain_read": card.launcher("read_all", Shape((blocks, 1), 256, 0), read)}
        for layout in LAYOUTS:
            for sums in SUMS:
                values = arguments(experts, row, sums, Address(memory[layout]), Address(codes),
                                   Address(factors[sums]), Address(scales), Address(out))  # fmt: skip
                launch = card.launcher(f"{layout}_{sums}", shape, values)
                launch()
                found = card.get(out, count * columns).reshape(count, 2, -1)
                for number in (0, 1, count // 2, count - 1):
                    errors[sums] = check(experts, row, sums, number % KINDS, found[number])
                launches[f"{place}_{layout}_{sums}"] = launch
        rates = best_rates(card, launches, nbytes, repeats)
        ceiling = rates[f"{place}_plain_read"].value
        for name, f in rates.items():
            bound = None if name.endswith("plain_read") else ceiling
            figures[name] = Figure(f.value, f.unit, ceiling=bound, min=f.min, max=f.max, runs=repeats)
    for sums, error in errors.items():
        figures[f"error_{sums}"] = Figure(float(f"{error:.2e}"), "of the sums, in float64")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures layouts of scales and rules of summing on a card.")
    parser.add_argument("--machine", required=True, help="what this machine is called in benchmarks/results")
    parser.add_argument("--gib", type=float, default=1.0, help="distinct experts of each layout, in VRAM and in RAM")
    parser.add_argument("--repeats", type=int, default=5, help="passes; the best counts")
    words = parser.parse_args()
    command = f"python benchmarks/layouts_card.py --machine {words.machine}"
    command += f" --gib {words.gib:g}" if words.gib != 1.0 else ""
    command += f" --repeats {words.repeats}" if words.repeats != 5 else ""
    try:
        context = open_context(0)
        card = Card(context)
        try:
            figures = measure(card, words.gib, words.repeats)
        finally:
            card.close()
            context.close()
        about = {"gpu": context.card.name, "multiprocessors": context.card.multiprocessors, "experts_gib": words.gib}
        record = Record(command, machine() | about, figures)
        record.write(record_path(RESULTS, words.machine, "layouts-card"))
    except StrataError as error:
        print(f"strata: error: {error}", file=sys.stderr)
        return error.exit_status
    for name, figure in figures.items():
        share = f"{figure.percent:6.1f} %" if figure.percent else ""
        print(f"{name:26} {figure.value:10.4g} {figure.unit:24} {share}")
    print(record.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
