"""``strata verify``'s own proof: all arms identical, each fault found, an arm that did nothing refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.config import Requested
from strata.config_sources import resolve
from strata.engine.arms import Arm, all_arms, arm_request, demo_arms, run_arm, self_tests
from strata.engine.identity import Script, Transcript, compare
from strata.engine.models import OpenModel, open_model
from strata.engine.planning import pin_request
from strata.engine.proof import Proof
from strata.errors import ConfigError, MemoryPlanError
from strata.memory.requests import PinRequest

SCRIPT = Script((1, 7, 130), 12)
REQUESTED = dataclasses.replace(Requested(), ram_gib=1.0, resident_headroom_gib=0.0)


@pytest.fixture
def model(packs: dict[str, Path]) -> Iterator[OpenModel]:
    opened = open_model(str(packs["default"]))
    yield opened
    opened.close()


def test_every_arm_is_identical(model: OpenModel) -> None:
    results = list(Proof(model, REQUESTED, SCRIPT).arms())
    assert [result.verdict for result in results] == ["identical"] * len(all_arms(model))
    assert len({result.transcript.sha256 for result in results if result.transcript}) == 1


def test_the_built_in_model_is_identical_in_the_demo() -> None:
    with Proof.open(REQUESTED, (), 16) as proof:
        results = list(proof.demo("def f(x):\n" * 12))
    assert [result.verdict for result in results] == ["identical"] * 6
    assert {result.counters["page_lock_path"] for result in results} == {0, 1, 2, 3}, "a mapped file takes no copy"
    assert all(any(mode in result.name for result in results) for mode in ("arena", "resident", "budget", "mapped"))


def test_every_fault_is_found() -> None:
    with Proof.open(REQUESTED, (1, 300), 16) as proof:
        results = list(proof.self_tests())
    assert len(results) == 7
    for result in results:
        assert result.good, result.verdict
        assert result.verdict.startswith("found: arm"), result.verdict


def test_an_arm_whose_mechanism_did_not_occur_is_an_error(model: OpenModel) -> None:
    reference = run_arm(model, REQUESTED, all_arms(model)[0], SCRIPT, reference=None).transcript
    idle = Arm("idle", {"expert_cache": 0}, ("swaps",))
    result = run_arm(model, REQUESTED, idle, SCRIPT, reference=reference)
    assert not result.good
    assert result.verdict == "not exercised: swaps"


def test_an_arm_that_cannot_be_loaded_is_an_error(model: OpenModel) -> None:
    hopeless = dataclasses.replace(REQUESTED, ram_gib=0.0001)
    reference = run_arm(model, REQUESTED, all_arms(model)[0], SCRIPT, reference=None).transcript
    result = run_arm(model, hopeless, all_arms(model)[1], SCRIPT, reference=reference)
    assert not result.good
    assert "too few" in result.verdict
    with pytest.raises(MemoryPlanError, match="too few"):
        run_arm(model, hopeless, all_arms(model)[0], SCRIPT, reference=None)


def test_lengths_are_cut_to_the_context_and_given_ones_refused(packs: dict[str, Path]) -> None:
    requested = dataclasses.replace(REQUESTED, model=str(packs["default"]))
    with Proof.open(requested, None, 12) as proof:
        assert proof.prompt_lengths == (1, 7, 65, 513, 1008)
    with (
        pytest.raises(ConfigError, match=r"2,000 and 12 tokens do not fit a context of 1,024"),
        Proof.open(requested, (2000,), 12),
    ):
        pass


def test_a_difference_is_placed() -> None:
    one = Transcript([[1, 2, 3]], ["a"])
    assert compare(one, Transcript([[1, 2, 3]], ["a"]), Script((5,), 3)) == ""
    assert compare(one, Transcript([[1, 2, 3]], ["b"]), Script((5,), 3)) == "prompt of 5: logits only, tokens equal"
    assert compare(one, Transcript([[1, 9, 3]], ["b"]), Script((5,), 3)) == "prompt of 5: tokens from token 2 on"


def test_arms_have_names_of_their_own(model: OpenModel) -> None:
    names = [arm.name for arm in all_arms(model)]
    assert len(set(names)) == len(names)
    assert len(demo_arms(model, 100)) == 6
    assert len(self_tests(model)) == 7


def test_an_arm_takes_the_path_that_it_is_named_for() -> None:
    """A copy of several GiB would take the faster path, and the arm of the other one would prove nothing."""
    assert resolve().prefer_slices == "auto"
    found = arm_request(resolve(), Arm("arena, path 1", {"expert_cache": 4}, ("page_lock_path = 1",)), Script())
    assert pin_request(found, PinRequest()).prefer_slices is False
