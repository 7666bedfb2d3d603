"""What a closed runtime leaves behind: none of its tensors, whoever still holds it, before the next is planned."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from strata.checkpoint.synthetic_reader import SyntheticWeights
from strata.config_sources import resolve_here
from strata.engine import load_memory
from strata.engine import runtime as runtime_module
from strata.engine.dense_block import DensePlacer
from strata.engine.engine import Engine
from strata.engine.models import BUILT_IN_NAME
from strata.engine.runtime import Runtime
from strata.engine.session import Session
from strata.engine.synthetic_bench import SyntheticCase, find_arms, run_decode_arms
from strata.engine.synthetic_model import open_synthetic
from strata.errors import EngineError
from strata.kernels.ops import Matrix
from tests.engine.emulated_device import EmulatedDevice, emulated_card

LAYERS = 2


def requested(**options: object) -> Any:
    asked = {"threads": 1, "ram_gib": 4, "max_context": 256, "expert_cache": 20, "vram_reserve_mib": 0}
    return resolve_here(arguments={**asked, **options})


def memory_of_tensors() -> dict[int, StorageWeakRef]:
    """All that tensors hold now, by its identity."""
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.untyped_storage().nbytes():
            storage = one.untyped_storage()
            found[storage._cdata] = StorageWeakRef(storage)
    return found


def count_alive(held: dict[int, StorageWeakRef]) -> int:
    return sum(not one.expired() for one in held.values())


@pytest.fixture
def _own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight has memory of its own, so that one that is still held is counted."""

    def copied(weight: object) -> object:
        if isinstance(weight, Matrix):
            scales = None if weight.scales is None else weight.scales.clone()
            return replace(weight, data=weight.data.clone(), scales=scales)
        return weight.clone() if isinstance(weight, torch.Tensor) else weight

    class Copying(DensePlacer):
        def __call__(self, weight: Any) -> Any:
            placed = super().__call__(weight)
            self.finish()
            return copied(placed)

    monkeypatch.setattr(load_memory, "DensePlacer", Copying)


@pytest.mark.usefixtures("_own_memory")
def test_a_routing_is_gone_when_the_next_one_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of RAM and of the card, state, buffers. The profile of each routing is learned by a load of its own."""
    loads: list[dict[int, StorageWeakRef]] = []
    alive: list[int] = []
    plan, new_session = runtime_module.make_plan, Session.__init__

    def planned(*given: Any) -> Any:
        gc.collect()  # as before a card is opened
        alive.append(sum(map(count_alive, loads)))
        return plan(*given)

    def watched(session: Session, runtime: Runtime) -> None:
        new_session(session, runtime)
        loads.append({key: one for key, one in memory_of_tensors().items() if key not in before})

    monkeypatch.setattr(runtime_module, "make_plan", planned)
    monkeypatch.setattr(Session, "__init__", watched)
    case = SyntheticCase("tiny-hyper", LAYERS, SyntheticWeights(), tokens=2, learn=2, runs=1)
    before = memory_of_tensors()
    with emulated_card():
        for result in run_decode_arms(case, find_arms(["skewed", "uniform"]), requested(), lambda _: None):
            assert result.on_card
    assert len(loads) == len(alive) == 4
    assert min(len(one) for one in loads) > 100
    # The open model keeps the scales of its experts, and no dense weights in RAM that lie on a card.
    assert alive == [0, 1, 0, 1]


@pytest.mark.usefixtures("_own_memory")
@pytest.mark.parametrize("on_card", [True, False])
def test_a_closed_runtime_that_is_still_held_holds_no_tensor(on_card: bool) -> None:
    model = open_synthetic("tiny-hyper", LAYERS)
    device = EmulatedDevice() if on_card else None
    model.dense()  # the open model's own, shared by all that is loaded from it
    options = {} if on_card else {"device": "cpu"}
    gc.collect()
    before, kept = memory_of_tensors(), []
    for _ in range(2):
        runtime = Runtime.open(model, requested(**options), device=device)
        session = Session(runtime)
        first = session.round([3, 4, 5]).clone()
        session.commit(2)
        mine = {key: one for key, one in memory_of_tensors().items() if key not in before}
        storage = first.untyped_storage()
        before[storage._cdata] = mine.pop(storage._cdata)  # the test's own
        del storage
        assert len(mine) > (100 if on_card else 5)
        rounds, counted = runtime.rounds, runtime.statistics().experts
        runtime.close()
        assert runtime.statistics().experts == counted  # a page of metrics may be asked for late
        kept.append((runtime, rounds, session if on_card else None, first))
        del session  # on the CPU the state is a session's
        assert count_alive(mine) == 0
    assert torch.equal(kept[0][3], kept[1][3])
    assert kept[0][0].vocabulary == model.config.vocabulary
    if on_card:
        assert kept[0][2] is not None
        with pytest.raises(EngineError, match="memory on the card"):
            kept[0][2].round([3])
    model.close()
    if device is not None:
        device.close()


def test_a_closed_engine_that_is_still_held_holds_no_weights() -> None:
    gc.collect()
    before = memory_of_tensors()
    engine = Engine.load(BUILT_IN_NAME, max_context=64, ram_gib=4, device="cpu")
    engine.generate("a", max_tokens=2)
    mine = {key: one for key, one in memory_of_tensors().items() if key not in before}
    assert len(mine) > 20
    engine.close()
    gc.collect()
    assert count_alive(mine) <= 2, "scales of the experts, which the reader has"
