"""What a card and its link give: reading VRAM, copying page-locked RAM in pieces like experts, and the gap of launches.

Lives in ``kernels/cuda`` because it drives the card. These are ceilings that a decode round is held against; they are
measured at the start of a benchmark, in what the plan has left free. It must not know models or tiers.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from strata.kernels.backend import DeviceMemoryFull, PinRefused
from strata.kernels.cuda.device import CudaMachine
from strata.kernels.cuda.driver import ask

if TYPE_CHECKING:
    from strata.kernels.backend import Backend
    from strata.kernels.cuda.program import Machine

__all__ = ["CardRates", "measure_card", "measure_link", "measure_together", "measure_vram"]

PASSES = 7
VRAM_BYTES = 256 << 20  # several times the largest last cache of a card
LINK_BYTES = 64 << 20
PIECE_BYTES = 2_764_800


@dataclass(frozen=True)
class CardRates:
    """Bytes a second; ``launch_seconds``: of one empty launch in a graph. None: there was no room to measure it."""

    vram: float | None
    link: float | None
    launch_seconds: float


def measure_card(machine: Machine, backend: Backend, num_launches: int) -> CardRates:
    """All three; only a real card has graphs whose launches take time."""
    each = 0.0
    if num_launches and isinstance(machine, CudaMachine):
        each = machine.empty_graph_ms(num_launches) / 1000 / num_launches
    vram = measure_vram(machine) if isinstance(machine, CudaMachine) else None
    return CardRates(vram, measure_link(backend), each)


def measure_vram(machine: CudaMachine) -> float | None:
    """Reading VRAM, as a sum over it; in the reserve that a plan leaves, so past what torch may take. None: no room."""
    context, driver = machine.context, machine.context.driver
    if context.memory()[0] < 2 * VRAM_BYTES:
        return None
    context.use()
    address = ask(driver.cuMemAlloc(VRAM_BYTES), "taking memory to measure VRAM")
    try:
        ask(driver.cuMemsetD32(address, 0x3F800000, VRAM_BYTES // 4), "filling it")
        memory = torch.as_tensor(_Floats(int(address), VRAM_BYTES // 4), device=machine.device)
        seconds = []
        memory.sum()
        for _ in range(PASSES):
            torch.cuda.synchronize(machine.device)
            began = time.perf_counter()
            for _ in range(8):  # the waiting at the end is a small part of it
                memory.sum()
            torch.cuda.synchronize(machine.device)
            seconds.append((time.perf_counter() - began) / 8)
        del memory
    finally:
        driver.cuMemFree(address)
    return VRAM_BYTES / statistics.median(seconds)


class _Floats:
    """Device memory as torch takes it from others."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<f4", "data": (address, False), "version": 3}


def measure_together(backend: Backend, read: Callable[[], float]) -> float | None:
    """Bytes a second of ``read`` (the CPU's, which returns its rate) and of copies over the link beside it."""
    try:
        target = backend.allocate(LINK_BYTES)
    except DeviceMemoryFull:
        return None
    try:
        source, registration = backend.allocate_pinned(LINK_BYTES)
    except PinRefused:
        target.free()
        return None
    stream, copied, ended = backend.stream(), [0.0], threading.Event()

    def copy() -> None:
        began, nbytes = time.perf_counter(), 0
        while not ended.is_set():
            for at in range(0, LINK_BYTES - PIECE_BYTES + 1, PIECE_BYTES):
                stream.copy(target.address + at, source.address + at, PIECE_BYTES)
                nbytes += PIECE_BYTES
            stream.synchronize()
        copied[0] = nbytes / (time.perf_counter() - began)

    beside = threading.Thread(target=copy)
    beside.start()
    try:
        rate = read()
    finally:
        ended.set()
        beside.join()
        registration.unregister()
        source.free()
        target.free()
    return rate + copied[0]


def measure_link(backend: Backend) -> float | None:
    """Copying page-locked RAM to the device in pieces as large as an expert."""
    try:
        target = backend.allocate(LINK_BYTES)
    except DeviceMemoryFull:
        return None
    try:
        source, registration = backend.allocate_pinned(LINK_BYTES)
    except PinRefused:
        target.free()
        return None
    stream, rates = backend.stream(), []
    pieces = range(0, LINK_BYTES - PIECE_BYTES + 1, PIECE_BYTES)
    for _ in range(PASSES):
        began = time.perf_counter()
        for at in pieces:
            stream.copy(target.address + at, source.address + at, PIECE_BYTES)
        stream.synchronize()
        rates.append(len(pieces) * PIECE_BYTES / (time.perf_counter() - began))
    registration.unregister()
    source.free()
    target.free()
    return statistics.median(rates)
