"""A load whose copy is page-locked while it is read: the same experts, and nothing left wherever it ends."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.errors import CheckpointError, EngineError
from strata.experts.system import ExpertSystem
from strata.experts.taking import take_experts
from strata.experts.tiers import Tier
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.host import HostBackend, HostFaults, HostRegistration
from strata.memory.planner import MIB, ResolvedPlan
from strata.memory.requests import PinRequest
from strata.stages import Stages
from tests.experts.small_model import Opened, SmallPack, make_plan, oracle, write_pack

Small = tuple[SmallPack, ExpertKernel]
SLICES = PinRequest(prefer_slices=True, touch_threads=2)  # one a layer, locked by a thread of their own


class SlowBackend(HostBackend):
    """Each registration takes a while, as a driver's does; one may break the device."""

    def __init__(self, faults: HostFaults | None = None, broken_at: int | None = None) -> None:
        super().__init__(256 * MIB, faults)
        self._broken_at = broken_at
        self.lockers: set[int] = set()

    def register(self, address: int, nbytes: int) -> HostRegistration:
        self.lockers.add(threading.get_ident())
        time.sleep(0.005)
        if len(self._pins) == self._broken_at:
            raise EngineError("the device is gone")
        return super().register(address, nbytes)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return write_pack(tmp_path_factory.mktemp("pack"))


def assert_nothing_left(backend: HostBackend, threads: int) -> None:
    backend.close()
    assert backend.statistics().pinned_bytes == backend.statistics().device_bytes == 0
    assert threading.active_count() == threads


def planned(pack: SmallPack) -> ResolvedPlan:
    resolved = make_plan(pack, pin=SLICES)
    assert pack.num_layers == 3
    assert resolved.mode == "arena"
    return resolved


@pytest.mark.parametrize("refused_at", [None, 0, 1, 2])
def test_a_pipelined_load_serves_the_same_experts(small: Small, refused_at: int | None) -> None:
    pack, kernel = small
    threads = threading.active_count()
    backend = SlowBackend(HostFaults(refuse_at_slice=refused_at, poison_after_refusal=True))
    stages = Stages()
    opened = Opened(ExpertSystem.open(planned(pack), pack, kernel, backend, stages=stages), backend, pack)
    assert backend.lockers.isdisjoint({threading.get_ident()})
    layers = pack.num_layers if refused_at is None else refused_at
    assert opened.system.statistics().experts_pinned == layers * pack.num_experts
    store = opened.system.store
    store.check()
    assert (store.host_tier == Tier.PINNED).tolist() == (store.alias != 0).tolist()
    assert np.count_nonzero(store.alias) == layers * pack.num_experts
    for seed, rows in ((1, 1), (2, 70)):
        torch.testing.assert_close(opened.forward(seed, rows), oracle(pack, kernel, seed, rows), rtol=0, atol=0)
    found = {stage.name: stage for stage in stages.in_order()}
    assert set(found) == {"page-locking", "experts into RAM", "slots"}
    assert list(found)[-1] == "slots"
    assert found["page-locking"].end <= found["slots"].begin
    opened.close()
    assert_nothing_left(backend, threads)


@pytest.mark.parametrize("broken_at", [0, 1, 2])
def test_a_device_that_breaks_while_a_slice_is_locked_ends_the_load(small: Small, broken_at: int) -> None:
    pack, kernel = small
    threads, backend = threading.active_count(), SlowBackend(broken_at=broken_at)
    with pytest.raises(EngineError, match="the device is gone"):
        ExpertSystem.open(planned(pack), pack, kernel, backend)
    assert_nothing_left(backend, threads)


@pytest.mark.parametrize("number", range(0, 24, 3))
def test_a_read_that_fails_while_slices_are_locked_names_its_expert(small: Small, tmp_path: Path, number: int) -> None:
    pack, kernel = small
    layer, expert = divmod(number, pack.num_experts)
    damaged = replace(pack, path=tmp_path / "experts.bin")
    data = bytearray(pack.path.read_bytes())
    data[int(pack.offsets[layer, expert]) + 9] ^= 1
    damaged.path.write_bytes(data)
    threads, backend = threading.active_count(), SlowBackend()
    with pytest.raises(CheckpointError, match=rf"expert {expert} of layer {layer} in experts\.bin"):
        ExpertSystem.open(planned(pack), damaged, kernel, backend)
    assert_nothing_left(backend, threads)


@pytest.mark.parametrize("point", range(0, 25, 2))
def test_ctrl_c_anywhere_leaves_nothing(small: Small, point: int) -> None:
    pack, kernel = small
    threads, backend, told = threading.active_count(), SlowBackend(), 0

    def interrupt(done: int, total: int) -> None:
        nonlocal told
        told += 1
        if told > point:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ExpertSystem.open(planned(pack), pack, kernel, backend, progress=interrupt)
    assert_nothing_left(backend, threads)


def test_what_was_taken_and_never_filled_is_given_back(small: Small) -> None:
    pack, _ = small
    threads, backend = threading.active_count(), SlowBackend()
    taken = take_experts(planned(pack), pack, backend, None)
    taken.owned.close()
    assert_nothing_left(backend, threads)
