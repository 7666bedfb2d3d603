"""Native grouping and look-up against the plain numpy grouping and a look-up written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cpu.experts import group_picks
from strata.kernels.cpu.picks import PickTables, Placements

LAYERS, EXPERTS, SLOTS, STRIDE, BASE = 3, 7, 5, 4096, 1 << 20


def make_tables(seed: int) -> tuple[PickTables, Placements]:
    random = np.random.default_rng(seed)
    total = LAYERS * EXPERTS
    slot_of = random.integers(-1, SLOTS, total).astype(np.int32)
    generation = random.integers(0, 3, SLOTS).astype(np.int64)
    placements = Placements(
        slot_of=slot_of,
        stamp_of=random.integers(0, 3, total).astype(np.int64),
        generation=generation,
        owner=random.integers(0, total, SLOTS).astype(np.int64),
        fallback_kind=random.integers(1, 5, total).astype(np.uint8),
        fallback=random.integers(0, 1 << 40, total).astype(np.uint64),
        scales=random.random((LAYERS, EXPERTS, 3)).astype(np.float32),
        slots_address=BASE,
        stride=STRIDE,
    )
    for slot in range(0, SLOTS, 2):  # some claims are true
        expert = int(random.integers(total))
        placements.slot_of[expert], placements.owner[slot] = slot, expert
        placements.stamp_of[expert] = generation[slot]
    return PickTables(placements), placements


@given(seed=st.integers(0, 1000), rows=st.integers(0, 90), top_k=st.integers(1, 4), layer=st.integers(0, LAYERS - 1))
@settings(max_examples=100)
def test_groups_and_finds(seed: int, rows: int, top_k: int, layer: int) -> None:
    tables, placed = make_tables(seed)
    ids = np.random.default_rng(seed).integers(0, EXPERTS, (rows, top_k)).astype(np.int32)
    expected = group_picks(ids)
    for _ in range(2):
        actual = tables.group(layer, ids)
    assert actual.tasks.experts.tolist() == expected.experts.tolist()
    assert actual.tasks.rows.tolist() == expected.rows.tolist()
    assert actual.tasks.slots.tolist() == expected.slots.tolist()
    assert actual.tasks.tasks["first"].tolist() == expected.tasks["first"].tolist()
    assert actual.tasks.tasks["count"].tolist() == expected.tasks["count"].tolist()
    stale = 0
    for task, expert in enumerate(expected.experts.tolist()):
        number = layer * EXPERTS + expert
        slot = int(placed.slot_of[number])
        valid = slot >= 0 and placed.generation[slot] == placed.stamp_of[number] and placed.owner[slot] == number
        stale += slot >= 0 and not valid
        assert actual.kinds[task] == (0 if valid else placed.fallback_kind[number])
        assert actual.tasks.tasks["blob"][task] == (BASE + slot * STRIDE if valid else placed.fallback[number])
        assert actual.tasks.tasks["scales"][task].tolist() == placed.scales[layer, expert].tolist()
    assert actual.num_stale == stale
    assert list(actual.by_kind) == np.bincount(actual.kinds, minlength=8).tolist()
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    counts[layer] = 2 * np.bincount(ids.ravel(), minlength=EXPERTS)
    assert (tables.counts == counts).all()


@pytest.mark.parametrize("bad", [-1, EXPERTS, 1 << 30])
def test_an_id_out_of_range_is_an_error(bad: int) -> None:
    tables, _ = make_tables(0)
    with pytest.raises(EngineError, match=f"expert {bad} of 7"):
        tables.group(0, np.array([[0, bad]], np.int32))
    with pytest.raises(EngineError, match="layer 3 of 3"):
        tables.group(LAYERS, np.array([[0, 1]], np.int32))
    tables.group(0, np.array([[0, 1]], np.int32))
