"""The README's table of what fits on which card is what the planner says, and says what arithmetic would."""

from __future__ import annotations

import re

from strata.engine.plan_subject import find_subject
from strata.errors import MemoryPlanError
from strata.memory.planner import GIB, ResolvedPlan
from tests.load_tool import load_tool


def test_the_readme_has_the_planners_table() -> None:
    table = load_tool("fits_table")
    assert table.PAGE.read_text() == table.render(), "run `make generate`"


def test_cells_hold_against_plain_arithmetic() -> None:
    """Slots are what the card leaves beside dense weights, and no mode holds more than the RAM there is."""
    table = load_tool("fits_table")
    for name in table.SHAPES:
        subject = find_subject(name, "bf16")
        blob, total = subject.shape.blob_bytes, subject.shape.total_experts
        for card in table.CARDS_GIB:
            for ram in table.RAM_GIB:
                found = table.plan_cell(subject, card, ram)
                if isinstance(found, MemoryPlanError):
                    assert subject.shape.dense_bytes + 3 * GIB > (card - 1) * GIB
                    continue
                assert isinstance(found, ResolvedPlan)
                assert found.num_slots * blob <= (card - 1) * GIB - subject.shape.dense_bytes
                assert found.num_ram_experts * blob <= (ram - 6) * GIB
                assert (found.mode == "arena") == (found.num_ram_experts == total)
                if found.mode == "resident":
                    assert found.num_slots + found.num_ram_experts >= total


def test_more_memory_never_fits_less() -> None:
    table = load_tool("fits_table")
    rows = re.findall(r"^\| \d+ GiB \|.*\|$", table.PAGE.read_text(), re.M)
    assert len(rows) == len(table.SHAPES) * len(table.CARDS_GIB)
    modes = ("refused", "budget", "resident", "arena")
    for row in rows:
        ranks = [modes.index(re.split(r"[;,:]", part.strip())[0]) for part in row.strip("|").split("|")[1:]]
        assert ranks == sorted(ranks)
