"""Devices of unequal size read their own layers alone, and drafts never cost the model its cache.

The numbers in the names are those of the project's list of faults seen in the field.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata.experts.injection import FaultInjection
from strata.experts.layer_split import LayerRange, LayerSplit, split_layers
from strata.experts.system import ExpertSystem
from strata.experts.tiers import Tier
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.host import HostBackend
from tests.experts.small_model import HIDDEN, MIB, TOP_K, SmallPack, draw_picks, make_plan, oracle, write_pack

NUM_LAYERS, NUM_EXPERTS = 5, 8
ROOMS = (18, 6)  # slots of two devices


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallPack, ExpertKernel]:
    return write_pack(tmp_path_factory.mktemp("pack"), NUM_LAYERS, NUM_EXPERTS)


@dataclasses.dataclass
class Recorder(FaultInjection):
    """Where a device's experts were computed from."""

    seen: list[tuple[Tier, int]] = dataclasses.field(default_factory=list)

    def before_compute(self, tier: Tier, address: int) -> None:
        self.seen.append((tier, address))


@pytest.mark.parametrize("mode", ["arena", "resident"])
def test_18_a_layer_is_read_from_its_own_device_only(small: tuple[SmallPack, ExpertKernel], mode: str) -> None:
    pack, kernel = small
    ranges = split_layers(NUM_LAYERS, ROOMS)
    assert [len(part) for part in ranges] == [4, 1]
    backends, systems, recorders = [], [], []
    for part, slots in zip(ranges, ROOMS, strict=True):
        backends.append(HostBackend(256 * MIB))
        recorders.append(Recorder())
        file = LayerRange(pack, part)
        plan = make_plan(file, mode=mode, expert_cache=slots, adapt_every=1, adapt_swaps=2)  # type: ignore[arg-type]
        systems.append(ExpertSystem.open(plan, file, kernel, backends[-1], injection=recorders[-1]))
    split = LayerSplit(ranges, systems)
    for seed, num_rows in ((1, 1), (2, 1), (3, 90), (4, 600), (5, 4), (6, 1)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, HIDDEN, generator=generator)
        for layer in range(NUM_LAYERS):
            ids, weights = draw_picks(generator, num_rows, NUM_EXPERTS)
            x = x + split(layer, x, ids, weights)
        torch.testing.assert_close(x, oracle(pack, kernel, seed, num_rows), rtol=0, atol=0)
        split.end_round()
    split.end_prompt()
    homes = [_own_memory(system) for system in systems]
    assert not set(homes[0]) & set(homes[1])
    for recorder, own in zip(recorders, homes, strict=True):
        assert {tier for tier, _ in recorder.seen} >= {Tier.VRAM, Tier.PINNED}
        assert all(any(address in part for part in own) for _, address in recorder.seen)
    split.close()
    for backend in backends:
        backend.close()


def _own_memory(system: ExpertSystem) -> list[range]:
    """Address ranges of a device's slots and of its copy in RAM."""
    slots, memory = system.store.slots, system.store.memory
    assert memory is not None
    return [
        range(slots.address, slots.address + slots.num_slots * slots.stride),
        range(memory.address, memory.address + memory.nbytes),
    ]


@given(rooms=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=6), more=st.integers(0, 60))
def test_18_layers_are_split_by_room(rooms: list[int], more: int) -> None:
    num_layers = len(rooms) + more
    found = split_layers(num_layers, rooms)
    assert [layer for part in found for layer in part] == list(range(num_layers))
    assert all(found)
    for part, room in zip(found, rooms, strict=True):
        exact = num_layers * room / sum(rooms)
        assert len(part) <= max(1, exact + 1 + len(rooms))
        assert len(part) >= min(1, exact)


NUM_TOKENS, CHAIN = 90, 6


def _play(
    small: tuple[SmallPack, ExpertKernel], *, drafts: bool, draft_layers: int
) -> tuple[int, list[NDArray[np.bool_]]]:
    """(hits of the model's own layers, who was in VRAM after each token) over one text whose topics change."""
    pack, kernel = small
    plan = make_plan(pack, mode="resident", expert_cache=20, adapt_every=3, adapt_swaps=1)
    plan = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, draft_layers=draft_layers))
    backend = HostBackend(256 * MIB)
    system = ExpertSystem.open(plan, pack, kernel, backend)
    x, weights = torch.ones(1, HIDDEN), torch.full((1, TOP_K), 0.5)
    hits, inside = 0, []
    text, chain = np.random.default_rng(0), np.random.default_rng(1)

    def pick(random: np.random.Generator, topic: int, layer: int) -> NDArray[np.int32]:
        return ((random.permutation(3)[:TOP_K] + 5 * topic + layer) % NUM_EXPERTS).astype(np.int32)

    for token in range(NUM_TOKENS):
        topic = token // 30
        for layer in range(NUM_LAYERS - 1):
            ids = pick(text, topic, layer)
            hits += int(system.store.in_vram()[layer, ids].sum())
            system.dispatcher(layer, x, torch.from_numpy(ids[None]), weights)
        for _ in range(CHAIN if drafts else 0):  # its topics change faster, so that it always wants another expert
            ids = pick(chain, token // 7, 0)
            system.dispatcher(NUM_LAYERS - 1, x, torch.from_numpy(ids[None]), weights)
        system.end_round()
        inside.append(system.store.in_vram()[: NUM_LAYERS - 1].copy())
    system.close()
    backend.close()
    return hits, inside


def test_19_drafts_cost_the_model_no_hit(small: tuple[SmallPack, ExpertKernel]) -> None:
    plain, plain_inside = _play(small, drafts=False, draft_layers=1)
    drafted, drafted_inside = _play(small, drafts=True, draft_layers=1)
    assert drafted >= plain
    for one, two in zip(plain_inside, drafted_inside, strict=True):
        assert (one == two).all(), "a draft moved an expert of the model"
    careless, _ = _play(small, drafts=True, draft_layers=0)
    assert careless < plain, "a draft that competes for swaps does cost hits: the text is one that tells"
