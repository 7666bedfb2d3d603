"""The benchmark of layouts on a card: its kernels compute the right numbers (emulated), and compile for every card."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cuda.compile import ARCHITECTURES, compile_source
from strata.kernels.cuda.program import Address
from tests.emulator import machine as emulation
from tests.emulator.compile import load_source
from tests.emulator.machine import EmulatedMachine, EmulatedProgram
from tests.load_tool import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "layouts_card.py"


@cache
def script() -> ModuleType:
    return load_script(SCRIPT)


def run(monkeypatch: pytest.MonkeyPatch, layout: str, sums: str, hidden: int, inner: int) -> list[np.ndarray]:
    """Gate and up of each expert by the emulated kernel, checked against float64."""
    one = script()
    source = load_source(one.kernel_source())
    monkeypatch.setattr(emulation, "load", lambda _: source)
    experts = one.Experts.make(hidden, inner)
    row = one.Row.of(np.random.default_rng(1).standard_normal(hidden).astype(np.float32))
    count, shape, program = 2, one.launch_of(experts, 2), EmulatedProgram()
    out = program.empty(count, 2, inner)
    factors = torch.from_numpy(row.wholes if sums == "any_order" else row.scales)
    values = one.arguments(experts, row, sums, torch.from_numpy(experts.bytes_of[layout][:count].copy()),
                           torch.from_numpy(row.codes), factors, torch.from_numpy(experts.scales[:count].copy()),
                           out)  # fmt: skip
    program.launch(f"x.{layout}_{sums}", shape.grid, shape.threads, *values, shared=shape.shared)
    machine = EmulatedMachine()
    machine.prepare(program.take()).run()
    machine.synchronize()
    program.check_guards()
    found = [out[kind].numpy() for kind in range(count)]
    for kind in range(count):
        error = one.check(experts, row, sums, kind, found[kind])
        assert error < (1e-6 if sums == "in_order" else 1e-4)
    with pytest.raises(EngineError, match="columns are wrong"):
        one.check(experts, row, sums, 1, found[0])
    return found


@pytest.mark.parametrize("sums", ["in_order", "any_order"])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 16), (640, 48), (2560, 32)])
def test_both_layouts_give_the_same_right_numbers(
    monkeypatch: pytest.MonkeyPatch, sums: str, hidden: int, inner: int
) -> None:
    beside, apart = (run(monkeypatch, layout, sums, hidden, inner) for layout in ("beside", "apart"))
    assert np.array_equal(beside, apart)


def test_the_plain_read_reads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    source = load_source(script().kernel_source())
    monkeypatch.setattr(emulation, "load", lambda _: source)
    program, words = EmulatedProgram(), torch.randint(-(2**31), 2**31 - 1, (1003 * 4,), dtype=torch.int32)
    out = program.empty(3 * 64, dtype=torch.int32)
    program.launch("x.read_all", (3,), 64, words, Address(1003), out)
    machine = EmulatedMachine()
    machine.prepare(program.take()).run()
    machine.synchronize()
    assert np.bitwise_xor.reduce(out.numpy()) == np.bitwise_xor.reduce(words.numpy())


class EmulatedCard:
    """The script's ``Card`` on the emulated one; every pass takes as long as its launches are many."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(card=SimpleNamespace(multiprocessors=1))
        self._kept: dict[int, np.ndarray] = {}

    def take(self, nbytes: int) -> int:
        return self.take_locked(nbytes)[1]

    def take_locked(self, nbytes: int) -> tuple[np.ndarray, int]:
        memory = np.zeros(nbytes + 64, np.uint8)
        place = memory[-memory.ctypes.data % 64 :][:nbytes]
        self._kept[place.ctypes.data] = place
        return place, place.ctypes.data

    def put(self, array: np.ndarray) -> int:
        address = self.take(array.nbytes)
        self.copy_to(address, array)
        return address

    def copy_to(self, address: int, array: np.ndarray) -> None:
        self._kept[address][:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def get(self, address: int, count: int) -> np.ndarray:
        return self._kept[address].view(np.float32)[:count].copy()

    def launcher(self, name: str, shape: Any, values: tuple[Any, ...]) -> Callable[[], None]:
        def launch() -> None:
            program, machine = EmulatedProgram(), EmulatedMachine()
            program.launch(f"x.{name}", shape.grid, shape.threads, *values, shared=shape.shared)
            machine.prepare(program.take()).run()
            machine.synchronize()

        return launch

    def seconds(self, launch: Callable[[], None], times: int) -> float:
        return 0.01 * times


def test_all_ways_are_measured_against_a_plain_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one = script()
    source, make = load_source(one.kernel_source()), one.Experts.make
    monkeypatch.setattr(emulation, "load", lambda _: source)
    monkeypatch.setattr(one.Experts, "make", lambda *_: make(2560, 16))
    figures = one.measure(EmulatedCard(), 0.0006, 3)
    ways = [f"{layout}_{sums}" for layout in ("beside", "apart") for sums in ("in_order", "any_order")]
    rates = [f"{place}_{way}" for place in ("vram", "locked") for way in ("plain_read", *ways)]
    assert list(figures) == [*rates, "error_in_order", "error_any_order"]
    for name in rates:
        assert figures[name].value == figures["vram_plain_read"].value > 0
        assert figures[name].ceiling == (None if "plain" in name else figures[name].value)
    assert figures["error_in_order"].value < 1e-6 < figures["error_any_order"].value < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles(architecture: int) -> None:
    assert compile_source(script().kernel_source(), architecture)[:4] == b"\x7fELF"
