"""The order of a load: a card's memory first, then RAM, page-locked beside the dense weights; its stages, its ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.config_sources import resolve_here
from strata.engine import load_memory
from strata.engine import runtime as runtime_module
from strata.engine.models import OpenModel, open_model
from strata.engine.runtime import Runtime
from strata.engine.synthetic_model import open_synthetic
from strata.errors import CheckpointError
from strata.kernels.host import HostBackend, HostRegistration
from strata.memory import page_lock
from strata.memory.read_ahead import ReadAhead
from strata.stages import Stage, format_stages
from tests.engine.emulated_device import EmulatedDevice
from tests.patience import PATIENCE_S

LIMIT_S = PATIENCE_S


@pytest.fixture
def model() -> Iterator[OpenModel]:
    opened = open_synthetic("tiny-hyper", 2)
    yield opened
    opened.close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a load does to memory, in order. Even this small a copy is locked by a thread of its own."""
    found: list[str] = []
    monkeypatch.setattr(page_lock, "TOUCH_IN_PARALLEL", 0)
    monkeypatch.setattr(page_lock, "MOST_TOUCH_THREADS", 2)

    def note(owner: Any, name: str, word: str) -> None:
        original = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            found.append(word)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    note(load_memory, "hold_to_plan", "charge")
    note(load_memory, "take_block", "block")
    note(HostBackend, "allocate", "slots")
    note(HostBackend, "register", "lock")
    note(OpenModel, "dense_elsewhere", "dense")
    return found


def requested(**options: object) -> Any:
    asked = {"threads": 2, "ram_gib": 4, "max_context": 256, "expert_cache": 20, "vram_reserve_mib": 0}
    return resolve_here(arguments=asked | {"prefer_slices": True} | options)


def test_what_a_card_gives_is_taken_before_ram_is_locked(model: OpenModel, events: list[str]) -> None:
    device = EmulatedDevice()
    runtime = Runtime.open(model, requested(), device=device)
    ordered = [one for one in events if one != "dense"]
    assert ordered[:3] == ["charge", "block", "slots"]
    assert set(ordered[3:5]) == {"lock"}
    names = [stage.name for stage in runtime.stages]
    for name in ("page-locking", "experts into RAM", "slots", "state of rounds", "test of the mailbox"):
        assert name in names
    assert names[0] == "probe"
    assert names[-1] == "rounds recorded"
    assert runtime.stages[-1].end <= runtime.statistics().ready_seconds
    runtime.close()
    device.close()


def test_dense_weights_are_read_while_ram_is_touched_and_before_it_is_locked(
    model: OpenModel, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    touching, is_read = threading.Event(), threading.Event()
    register, dense, touch = HostBackend.register, OpenModel.dense, page_lock.system.touch_pages

    def late(backend: HostBackend, address: int, nbytes: int) -> HostRegistration:
        assert is_read.is_set(), "a driver that locks pages lets no weight through"
        return register(backend, address, nbytes)

    def touched(*given: Any) -> Any:
        touching.set()
        return touch(*given)

    def read(opened: OpenModel, *given: Any) -> Any:
        assert touching.wait(LIMIT_S), "pages are not touched while dense weights are read"
        time.sleep(0.02)
        found = dense(opened, *given)
        is_read.set()
        return found

    monkeypatch.setattr(HostBackend, "register", late)
    monkeypatch.setattr(page_lock.system, "touch_pages", touched)
    monkeypatch.setattr(OpenModel, "dense", read)
    runtime = Runtime.open(model, requested(device="cpu"))
    found = {stage.name: stage for stage in runtime.stages}
    assert found["dense weights"].end <= found["page-locking"].begin
    assert runtime.statistics().experts.experts_pinned == 2 * 64
    runtime.close()


def test_dense_weights_are_read_ahead_until_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model("small")
    told: list[Any] = []

    class Recorder(ReadAhead):
        def __init__(self, path: Path | None) -> None:
            told.append(path)
            super().__init__(None)

        def reached(self, nbytes: int) -> None:
            told.append(nbytes)

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setattr(runtime_module, "ReadAhead", Recorder)
    shown: list[str] = []
    runtime = Runtime.open(model, requested(device="cpu"), on_progress=lambda phase, done, total: shown.append(phase))
    assert told[0] == model.reader.dense_file
    assert told[-2:] == [model.reader.dense_bytes, "closed"]
    assert told[1:-1] == sorted(told[1:-1])
    assert {"dense weights", "experts"} <= set(shown)
    runtime.close()
    assert told[-1] == "closed"
    del told[:]
    Runtime.open(model, requested(device="cpu")).close()
    assert told[0] is None, "they are in memory"
    model.close()


@pytest.mark.parametrize(
    "failure", [CheckpointError("the dense weights are damaged", "pack again"), KeyboardInterrupt()]
)
def test_dense_weights_that_fail_end_the_locking(
    model: OpenModel, events: list[str], monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    threads, device = threading.active_count(), EmulatedDevice()
    register = HostBackend.register

    def slow(backend: HostBackend, address: int, nbytes: int) -> HostRegistration:
        time.sleep(0.05)
        return register(backend, address, nbytes)

    def fail(*_: Any) -> Any:
        raise failure

    monkeypatch.setattr(HostBackend, "register", slow)
    monkeypatch.setattr(OpenModel, "dense_elsewhere", fail)
    with pytest.raises(type(failure)):
        Runtime.open(model, requested(), device=device)
    assert device.backend.statistics().pinned_bytes == device.backend.statistics().device_bytes == 0
    assert threading.active_count() == threads
    device.close()


def test_stages_say_what_ran_beside_what() -> None:
    stages = [Stage("probe", 0.0, 0.5), Stage("page-locking", 0.5, 2.25), Stage("dense weights", 0.75, 1.0)]
    stages.append(Stage("slots", 2.25, 2.5))
    assert format_stages(stages) == "probe 0.50, page-locking 0.50-2.25, dense weights 0.75-1.00, slots 0.25"
