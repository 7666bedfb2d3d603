"""``strata verify``'s own proof: all arms identical, each fault found, an arm that did nothing refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from strata.config import Requested
from strata.config_sources import resolve
from strata.engine.arms import WIDE, Arm, all_arms, arm_request, demo_arms, run_arm, self_tests
from strata.engine.identity import Script, Transcript, _read, compare
from strata.engine.models import OpenModel, open_model
from strata.engine.planning import pin_request
from strata.engine.prompt_lengths import LengthPlan, edges
from strata.engine.proof import Proof
from strata.errors import ConfigError, MemoryPlanError
from strata.kernels.cpu.blocks import row_blocks
from strata.memory.requests import PinRequest
from tests.engine.random_models import write_random_model

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


@pytest.mark.slow
def test_every_fault_is_found(tmp_path: Path) -> None:
    requested = dataclasses.replace(REQUESTED, model=str(write_random_model(tmp_path, "qwen3_moe")))
    with Proof.open(requested, (1, 40, 520), 24) as proof:
        results = list(proof.self_tests())
    assert len(results) == 15
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
        assert proof.prompt_lengths[:5] == (1, 2, 3, 4, 5)
        assert proof.prompt_lengths[-1] == 1004
    with (
        pytest.raises(ConfigError, match=r"2,000 and 12 tokens do not fit a context of 1,024"),
        Proof.open(requested, (2000,), 12),
    ):
        pass


def test_a_difference_is_placed() -> None:
    one = Transcript([4, 5], [[7], [1, 2, 3]], ["c", "a"])
    assert compare(one, Transcript([5], [[1, 2, 3]], ["a"])) == ""
    assert compare(one, Transcript([5], [[1, 2, 3]], ["b"])) == "prompt of 5: logits only, tokens equal"
    assert compare(one, Transcript([5], [[1, 9, 3]], ["b"])) == "prompt of 5: tokens from token 2 on"
    assert compare(one, Transcript([5], [[1, 2, 3]], ["a"], "other answers")) == "other answers"


def test_arms_have_names_of_their_own(model: OpenModel) -> None:
    names = [arm.name for arm in all_arms(model)]
    assert len(set(names)) == len(names)
    assert len(demo_arms(model, 100)) == 6
    planted = self_tests(model)
    assert len({test.name for test in planted}) == len(planted) == 15


def test_an_arm_takes_the_path_that_it_is_named_for() -> None:
    """A copy of several GiB would take the faster path, and the arm of the other one would prove nothing."""
    assert resolve().prefer_slices == "auto"
    found = arm_request(resolve(), Arm("arena, path 1", {"expert_cache": 4}, ("page_lock_path = 1",)), 100)
    assert pin_request(found, PinRequest()).prefer_slices is False


@pytest.mark.slow
def test_the_wide_model_is_read_alike_fast_from_all_tiers_and_in_small_windows() -> None:
    """A product of wide rows that reads another row's memory shows at the tails of blocks (97 is 96 and one)."""
    with Proof.open(REQUESTED, (97, 101), 24, wide=True) as proof:
        names = [f"wide: {name}" for name in WIDE]
        assert [name for name in proof.chosen() if name.startswith("wide: ")] == names
        found = {result.name: result.verdict for result in proof.arms(("wide: all tiers",))}
    assert found["wide: all in VRAM"] == "identical"
    assert found["wide: all tiers, small windows"] == "identical", found


def test_groups_end_a_prompt_and_hold_every_small_row_count(model: OpenModel) -> None:
    arm = next(arm for arm in all_arms(model) if arm.reading)
    assert sorted(arm.reading) == list(range(1, 32))
    for length in (1, 2, 40, 1000):
        read: list[int] = []
        logits = _read(_Reader(read), range(length), arm.reading)  # type: ignore[arg-type]
        assert sum(read) == length
        assert read[::-1] == [rows for rows, _ in zip(itertools.cycle(arm.reading), read[:-1], strict=False)] + read[:1]
        assert int(logits) == length - 1


class _Reader:
    """Takes note of how many rows are read at once."""

    def __init__(self, read: list[int]) -> None:
        self._read = read

    def read_prompt(self, ids: Sequence[int]) -> int:
        self._read.append(len(ids))
        return ids[-1]


def test_lengths_lie_at_the_edges_of_blocks() -> None:
    assert edges((1, 32)) == (1, 2, 6, 31, 32, 33, 37)
    plan = LengthPlan.of_kernels(4096, None)
    for block in row_blocks().values():
        assert {block - 1, block, block + 1, block + 5} - {0} <= set(plan.edges)
    assert {1023, 1024, 1025, 1029} <= set(plan.chunks)
    many = [length for length in plan.edges if plan.script.tokens_after(length) == 64]
    assert len(many) == 2
    assert {plan.script.tokens_after(length) for length in plan.edges if length not in many} == {8}
    whole = LengthPlan.of_kernels(4096, None, whole=True)
    assert set(whole.script_of("classes").prompt_lengths) == {*plan.classes, *plan.edges}
    assert set(whole.script_of("classes", long_chunks=True).prompt_lengths) == {
        *plan.classes,
        *plan.edges,
        *plan.chunks,
    }
    assert {33, 37, 97, 101} <= set(plan.tails) < set(plan.edges)
    assert plan.script_of("classes").prompt_lengths == plan.classes
