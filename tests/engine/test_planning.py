"""From options to the planner's numbers: how much RAM stays free, and which variable page-locks."""

from __future__ import annotations

import dataclasses

import pytest

from strata.config import Requested
from strata.config_sources import resolve
from strata.engine.plan_report import plan_subject
from strata.engine.plan_subject import find_subject
from strata.engine.planning import headroom_bytes
from strata.memory.probe import Machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "available", "expected"),
    [
        ({}, 64 * GIB, 4 * GIB),
        ({}, 16 * GIB, 4 * GIB),
        ({}, 4 * GIB, GIB),
        ({}, 1 * GIB, GIB // 4),
        ({"ram_gib": "2"}, 2 * GIB, 0),
        ({"resident_headroom_gib": "4"}, 4 * GIB, 4 * GIB),  # set, though to the default's number
        ({"resident_headroom_gib": "3", "ram_gib": "2"}, 2 * GIB, 3 * GIB),
    ],
)
def test_headroom_is_a_quarter_of_a_small_machine_unless_set(
    options: dict[str, str], available: int, expected: int
) -> None:
    assert headroom_bytes(resolve(command_line=options), available) == expected


def test_headroom_set_without_an_origin_counts_as_set() -> None:
    assert headroom_bytes(dataclasses.replace(Requested(), resident_headroom_gib=0.5), 64 * GIB) == GIB // 2


@pytest.mark.parametrize("free_mib", [256, 1024, 4096])
def test_the_built_in_model_is_planned_on_a_machine_with_little_free_ram(free_mib: int) -> None:
    free = free_mib << 20
    plan = plan_subject(
        find_subject(None, "bf16"), Requested(), Machine("", 2, 4 * GIB, free, "free RAM", None, (), ())
    )
    assert plan.mode == "arena"
    assert plan.ram["headroom"] == free // 4
    assert plan.ram_bytes <= free
