"""A slot's generation rises whenever its bytes stop being what they were, and a stale memory never hits."""

from __future__ import annotations

import numpy as np
import pytest

from strata.experts.slots import NOBODY, SlotCache


def test_generations_rise_at_every_change_of_bytes() -> None:
    cache = SlotCache(1 << 20, 3, 4096, 10)
    seen = [int(cache.generation[1])]
    for change in (
        lambda: cache.invalidate(1),
        lambda: cache.admit(7, 1),
        lambda: cache.evict(1),
        lambda: cache.admit(7, 1),
    ):
        change()
        seen.append(int(cache.generation[1]))
    assert seen == sorted(set(seen))
    assert cache.generation[[0, 2]].tolist() == [0, 0]


def test_a_remembered_slot_hits_only_while_slot_generation_and_owner_agree() -> None:
    cache = SlotCache(1 << 20, 2, 4096, 4)
    cache.admit(3, 1)
    hit, slot, stale = cache.find(np.array([3, 0]))
    assert (hit.tolist(), slot.tolist(), stale) == ([True, False], [1, -1], 0)
    assert cache.slot_address(1) == (1 << 20) + 4096
    cache.generation[1] += 1
    assert cache.find(np.array([3]))[2] == 1
    cache.generation[1] -= 1
    cache.owner[1] = NOBODY
    assert cache.find(np.array([3]))[2] == 1


def test_what_must_never_be_asked_is_asserted() -> None:
    cache = SlotCache(1 << 20, 2, 4096, 4)
    cache.admit(3, 1)
    for wrong in (
        lambda: cache.admit(2, 1),
        lambda: cache.admit(3, 0),
        lambda: cache.evict(0),
        lambda: cache.invalidate(1),
    ):
        with pytest.raises(AssertionError):
            wrong()
    assert cache.evict(1) == 3
    assert cache.slot_of[3] == cache.stamp_of[3] == -1


def test_a_cache_of_no_slots_never_hits() -> None:
    hit, _, stale = SlotCache(0, 0, 4096, 4).find(np.array([0, 3]))
    assert not hit.any()
    assert stale == 0
