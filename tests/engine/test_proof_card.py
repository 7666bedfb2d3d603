"""``strata verify`` on a card: random models of both families through every placement, and faults that must be found.

What runs on a real card (`make test-gpu`) runs here over a card that is emulated, with fewer arms. Imports no oracle,
so that a machine with nothing but the package can run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.config import Requested
from strata.engine import arms
from strata.engine.arms import HOST_ALONE, all_arms, self_tests
from strata.engine.identity import Script
from strata.engine.models import OpenModel, open_model
from strata.engine.proof import Proof
from tests.engine.random_models import FAMILIES, write_random_model

CARD = dataclasses.replace(Requested(), device="cuda", ram_gib=2.0, resident_headroom_gib=0.0, vram_reserve_mib=0)
EMULATED_FAULTS = (
    "one bit flipped in VRAM", "one bit flipped in PINNED", "one bit flipped in PINNED, link",
    "a wrong expert swapped in from FILE", "another id from the greedy path",
)  # fmt: skip
EMULATED_ARMS = ("a swap every round", "PCIe share 0.5, fixed")


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenModel]:
    opened = open_model(str(write_random_model(tmp_path, request.param)))
    yield opened
    opened.close()


def test_arms_of_random_models_are_identical_where_a_card_is_emulated(model: OpenModel) -> None:
    from tests.engine.emulated_device import emulated_card

    with emulated_card():
        results = list(Proof(model, CARD, Script((3,), 10, windows=(1, 4))).arms(EMULATED_ARMS))
    found = {result.name: result.verdict for result in results}
    assert set(EMULATED_ARMS) <= set(found)
    assert set(found.values()) == {"identical"}, found
    assert len({result.transcript.sha256 for result in results if result.transcript}) == 1


@pytest.mark.parametrize("planted", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_faults_are_found_where_a_card_is_emulated(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.emulated_device import emulated_card

    if planted == "some":
        monkeypatch.setattr(
            arms,
            "self_tests",
            lambda *of, **how: [one for one in self_tests(*of, **how) if one.name in EMULATED_FAULTS],
        )
    model = open_model(str(write_random_model(tmp_path, "qwen3_moe")))
    with emulated_card():
        proof = Proof(model, CARD, Script((3,), 24, windows=(1,)))
        assert proof.not_planted == HOST_ALONE
        results = list(proof.self_tests())
        assert planted == "all" or {result.name for result in results} == set(EMULATED_FAULTS)
        assert len(results) == proof.count_self_tests()
    model.close()
    for result in results:
        assert result.good, (result.name, result.verdict)
        assert result.verdict.startswith("found: arm"), result.verdict


def test_a_card_has_the_hosts_faults_but_those_of_the_host_alone(model: OpenModel) -> None:
    on_card = [test.name for test in self_tests(model, on_card=True)]
    host = [test.name for test in self_tests(model)]
    assert set(HOST_ALONE) < set(host)
    assert set(host) - set(on_card) == set(HOST_ALONE)
    assert [name for name in on_card if name not in host] == ["one bit flipped in PINNED, link"]


@pytest.mark.gpu
def test_every_arm_of_random_models_is_identical_on_a_card(model: OpenModel) -> None:
    results = list(Proof(model, CARD, Script((1, 7, 130), 24)).arms())
    assert [result.verdict for result in results] == ["identical"] * len(all_arms(model, on_card=True))
    assert len({result.transcript.sha256 for result in results if result.transcript}) == 1


@pytest.mark.gpu
def test_every_fault_is_found_on_a_card(model: OpenModel) -> None:
    for result in Proof(model, CARD, Script((7, 60), 48)).self_tests():
        assert result.good, (result.name, result.verdict)
        assert result.verdict.startswith("found: arm"), result.verdict
