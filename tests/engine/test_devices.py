"""Which device computes, what is said where a card cannot, and the room that a plan gets of an opened one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
import torch

from strata.config import Requested
from strata.engine.devices import card_room, choose_card, hold_to_plan, named_refusals, open_device
from strata.engine.plan_report import is_usable, plan_room
from strata.errors import ConfigError, MemoryPlanError
from strata.kernels.cuda.cuda_device import CudaDevice
from strata.memory.planner import GIB, MIB, plan
from strata.memory.probe import Gpu, Machine
from strata.memory.requests import MemoryRequest, ModelShape
from tests.kernels.fake_cuda import FakeCard, FakeCuda

GPUS = (Gpu("Some card", GIB, 700 * MIB, "600.1"),)
MACHINE = Machine("A processor", 8, 32 * GIB, 20 * GIB, "free RAM", None, (5 * GIB,), GPUS)
NO_CARD = dataclasses.replace(MACHINE, gpus=())
SHAPE = ModelShape("small", 2, 8, 2, blob_bytes=MIB, hidden=64, dense_bytes=20 * MIB)


def asked(**options: object) -> Requested:
    return dataclasses.replace(Requested(), **options)  # type: ignore[arg-type]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *words: None)
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *words: 0)
    return FakeCuda().install(monkeypatch)


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    card = choose_card(asked(), MACHINE)
    assert card is not None
    with open_device(asked(vram_gib=0.5), card) as device:
        yield device


@pytest.mark.parametrize(
    ("name", "machine", "index"),
    [
        ("auto", MACHINE, 0),
        ("auto", NO_CARD, None),
        ("cpu", MACHINE, None),
        ("cuda", MACHINE, 0),
        ("cuda:1", MACHINE, 1),
    ],
)
def test_the_choice(fake: FakeCuda, name: str, machine: Machine, index: int | None) -> None:
    fake.cards = [FakeCard(), FakeCard()]
    card = choose_card(asked(device=name), machine)
    assert (None if card is None else card.index) == index


def test_a_card_that_cannot_be_used_is_a_line_for_auto_and_an_error_by_name(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    fake.driver_version = 12080
    with caplog.at_level(logging.INFO):
        assert choose_card(asked(), MACHINE) is None
    (line,) = caplog.messages
    assert line.startswith("Some card is not used, the CPU computes: the NVIDIA driver serves CUDA 12.8")
    with pytest.raises(ConfigError, match=r"CUDA 12\.8"):
        choose_card(asked(device="cuda"), MACHINE)
    assert not is_usable(asked(device="cuda"), MACHINE)


def test_the_room_is_what_is_free_once_it_is_open(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    card = choose_card(asked(), MACHINE)
    assert card is not None
    with open_device(asked(), card) as device:
        room = card_room(asked(), MACHINE, device)
        assert (room.kind, room.free_bytes, room.is_capped) == ("cuda", 900 * MIB, False)
        assert room.pin_rooms == (5 * GIB,)
    half = asked(vram_gib=0.5)
    with open_device(half, card) as device:
        assert card_room(half, MACHINE, device).free_bytes == 512 * MIB
        assert card_room(half, MACHINE, device).is_capped
        fake.cards[0].memory_free = 100 * MIB
        with caplog.at_level(logging.WARNING):
            room = card_room(half, MACHINE, device)
        assert (room.free_bytes, room.is_capped) == (100 * MIB, False)
        assert "--vram-gib 0.5: only 100.0 MiB of VRAM are free" in caplog.text


def test_torch_is_held_to_what_the_plan_leaves_beside_the_slots(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *words: fractions.append(words))
    request = MemoryRequest(ram_bytes=8 * GIB, vram_reserve_bytes=100 * MIB, pass_rows=8, ring_slots=0)
    resolved = plan(SHAPE, request, card_room(asked(vram_gib=0.5), MACHINE, device))
    assert resolved.num_slots == 16
    release = hold_to_plan(device, resolved)
    assert fractions == [((512 - 16) / 1024, 0)]
    assert device.backend.statistics().charged_bytes == resolved.vram_bytes - 116 * MIB
    slots = device.backend.allocate(16 * MIB)
    with (
        pytest.raises(MemoryPlanError, match="no room for more than planned"),
        named_refusals(device, "more than planned"),
    ):
        device.backend.allocate(480 * MIB)
    slots.free()
    release()
    assert device.backend.statistics().charged_bytes == 0


def test_another_program_took_the_memory(fake: FakeCuda, device: CudaDevice) -> None:
    fake.cards[0].memory_free = 3 * MIB
    with pytest.raises(MemoryPlanError) as refused, named_refusals(device, "8 expert slots"):
        device.backend.allocate(4 * MIB)
    assert refused.value.short_bytes == MIB
    assert refused.value.message == "no room for 8 expert slots (4.0 MiB): only 3 MiB of VRAM free"
    assert "--vram-reserve-mib" in refused.value.hint
    with (
        pytest.raises(MemoryPlanError, match="no room for dense weights: only 3 MiB"),
        named_refusals(device, "dense weights"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("options", "free", "is_capped"),
    [
        ({"device": "cuda"}, 700 * MIB, False),
        ({"device": "cuda", "vram_gib": 24.0}, 24 * GIB, True),
        ({"device": "cuda:3", "vram_gib": 24.0}, 24 * GIB, True),
        ({}, 700 * MIB, False),
        ({"vram_gib": 24.0}, 700 * MIB, False),
        ({"vram_gib": 0.25}, 256 * MIB, True),
    ],
)
def test_what_is_planned_for(fake: FakeCuda, options: dict[str, object], free: int, is_capped: bool) -> None:
    room = plan_room(asked(**options), MACHINE)
    assert (room.kind, room.free_bytes, room.is_capped) == ("cuda", free, is_capped)
    is_here = options.get("device") != "cuda:3"
    assert room.pin_rooms == (MACHINE.pin_rooms if is_here else ())
    assert plan_room(asked(device="cpu"), MACHINE).kind == "cpu"
    assert plan_room(asked(), NO_CARD).kind == "cpu"
