"""Measures how much longer a layer takes when experts that it picks are read from a file: the file tier of a forecast.

Lives in ``engine`` because it runs the dispatcher of experts, with its reading threads, buffers and pool, over experts
of two sizes: a rate of reads alone leaves out that readers and kernels share the processors. It must not know a family.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from strata.engine.plan_subject import NUM_SAMPLES
from strata.engine.rates import FileCosts
from strata.experts.dispatch import Dispatcher
from strata.experts.source import BlobPlace
from strata.experts.system import ExpertSystem
from strata.kernels.bench import ExpertsInMemory, huge_pages
from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.host import HostBackend
from strata.memory import planner
from strata.memory.bandwidth import scratch_file
from strata.memory.planner import ResolvedPlan
from strata.memory.requests import DeviceRoom, MemoryRequest, ModelShape
from strata.memory.system import system
from strata.quant import ExpertFormat, ExpertLayout
from strata.stats import steady_mean

__all__ = ["measure_file"]

READS = (1, 2, 4, 8, 16)  # of one layer; as many as there are staging buffers at most
SWEEPS = 16
# Widths whose experts are a toy's and a real model's; the second are taken from the model's own file where it is large.
SMALL, LARGE = (256, 256), (2560, 640)
LARGE_BYTES = 1 << 20
KINDS = ("memory", "cached", "drive")
Layer = Callable[[list[int]], float]  # seconds of one that picks these experts


def measure_file(folder: Path, layout: ExpertLayout, sample: Sequence[BlobPlace], threads: int) -> FileCosts | None:
    """Costs of experts of ``layout`` and of small ones. ``sample``: where some of the model's own lie.

    The pool must have been configured, with ``threads``. What is not sampled is a file in ``folder``, which is removed
    again. None where the drive has no room for it.
    """
    found: dict[str, dict[int, dict[int, float]]] = {kind: {} for kind in KINDS}
    with ExitStack() as owned:
        files = [owned.enter_context(_made_experts(folder, SMALL, layout.format))]
        if len(sample) > READS[-1] and layout.blob_bytes >= LARGE_BYTES:
            files.append(_Experts(layout, tuple(sample)))
        else:
            files.append(owned.enter_context(_made_experts(folder, LARGE, layout.format)))
        for file in files:
            if file is None:
                return None
            for kind, seconds in _measure(file, threads).items():
                found[kind][file.blob_bytes] = seconds
    return FileCosts(found["cached"], found["drive"] or None)


class _Experts:
    """Experts of one layer in a file (``experts.source.ExpertFile``). Nobody reads what they compute."""

    num_layers = 1

    def __init__(self, layout: ExpertLayout, places: tuple[BlobPlace, ...]) -> None:
        self.layout = layout
        self.num_experts, self.blob_bytes = len(places), layout.blob_bytes
        self.scales = np.ones((1, len(places), 3), np.float32)
        self.places = places

    def place(self, layer: int, expert: int) -> BlobPlace:
        assert layer == 0, "there is one layer"
        return self.places[expert]


@contextmanager
def _made_experts(folder: Path, widths: tuple[int, int], format: ExpertFormat) -> Iterator[_Experts | None]:
    """Random experts in a file that is gone afterwards; None where the drive has no room for it."""
    layout = ExpertLayout(*widths, format)
    made = ExpertsInMemory(layout, huge_pages(NUM_SAMPLES * layout.blob_bytes))
    address, nbytes = made.blobs.ctypes.data, layout.blob_bytes
    with scratch_file(folder, address, NUM_SAMPLES * nbytes) as path:
        if path is None:
            yield None
            return
        starts = [index * nbytes for index in range(NUM_SAMPLES)]
        places = [BlobPlace(path, at, nbytes, checksum_at(address + at, nbytes)) for at in starts]
        yield _Experts(layout, tuple(places))


def _measure(file: _Experts, threads: int) -> dict[str, dict[int, float]]:
    """Seconds that a layer takes longer than from memory, by kind and the number of experts that it reads."""
    source, layers = random.Random(0), dict[str, Layer]()
    with ExitStack() as owned:
        for kind in _kinds(file):
            opened = ExpertSystem.open(_plan(file, kind, threads), file, ExpertKernel(file.layout), HostBackend(0))
            owned.callback(opened.close)
            layers[kind] = _layer(opened.dispatcher, file)
        numbers = list(range(file.num_experts))
        for first in range(0, len(numbers), READS[-1]):  # into the page cache
            layers["cached"](numbers[first : first + READS[-1]])
        memory = layers.pop("memory")
        return {kind: _compare(layer, memory, numbers, source) for kind, layer in layers.items()}


def _compare(layer: Layer, memory: Layer, numbers: list[int], source: random.Random) -> dict[int, float]:
    """How much longer ``layer`` takes than ``memory``, by the number of experts.

    Who goes first changes: on a busy machine a layer that follows a wait for the drive is given its processor sooner.
    Each follows one of its own kind, as in rounds and as the rates of experts in memory were measured: from memory a
    layer takes longer right after one that was read (cpu2: 1.36 ms against 0.95), and one that is read takes less after
    one from memory, so the difference came out too small.
    """
    looks: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in READS}
    for sweep in range(SWEEPS):
        for count, found in looks.items():
            pair = ((memory, found[0]), (layer, found[1]))
            for each, seconds in pair if sweep % 2 else pair[::-1]:
                each(source.sample(numbers, count))
                seconds.append(each(source.sample(numbers, count)))
    return {count: max(0.0, steady_mean(slow) - steady_mean(fast)) for count, (fast, slow) in looks.items()}


def _kinds(file: _Experts) -> list[str]:
    """All that can be measured: a file system in RAM has no drive to read past its cache."""
    direct = system.open_direct(file.places[0].path)
    if direct is None:
        return ["memory", "cached"]
    os.close(direct)
    return list(KINDS)


def _layer(dispatcher: Dispatcher, file: _Experts) -> Layer:
    """Seconds of a layer of one row that picks these experts."""
    x_TH = torch.randn(1, file.layout.hidden, generator=torch.Generator().manual_seed(1))

    def run(picked: list[int]) -> float:
        ids_TK, weights_TK = torch.tensor([picked], dtype=torch.int32), torch.full((1, len(picked)), 1 / len(picked))
        began = time.perf_counter()
        dispatcher(0, x_TH, ids_TK, weights_TK)
        seconds = time.perf_counter() - began
        dispatcher.take_flags()
        return seconds

    return run


def _plan(file: _Experts, kind: str, threads: int) -> ResolvedPlan:
    """All experts in RAM, or none: how much RAM there is plays no part."""
    layout = file.layout
    shape = ModelShape("samples", 1, file.num_experts, READS[-1], layout.blob_bytes, layout.hidden, dense_bytes=0)
    request = MemoryRequest(
        ram_bytes=1 << 50,
        mode="arena" if kind == "memory" else "budget",
        budget_bytes=None if kind == "memory" else 0,
        headroom_bytes=0,
        chunk_rows=1,
        pass_rows=1,
        num_cpus=threads,
    )
    plan = planner.plan(shape, request, DeviceRoom("cpu", None))
    return dataclasses.replace(plan, direct_reads=kind == "drive")
