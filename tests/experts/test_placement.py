"""Placement never changes a token: every tier forced in turn gives the bits of one plain array of experts."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.host import HostFaults
from tests.experts.small_model import SmallPack, open_system, oracle

Small = tuple[SmallPack, ExpertKernel]

HALF = HostFaults(refuse_one_allocation=True, refuse_at_slice=1)
ARMS: dict[str, tuple[dict[str, object], HostFaults]] = {
    "all fast": ({"expert_cache": 24}, HostFaults()),
    "no slots": ({"expert_cache": 0}, HostFaults()),
    "arena, pinned": ({}, HostFaults()),
    "arena, slices refused half-way": ({}, HALF),
    "arena, nothing pinned": ({}, HostFaults(refuse_one_allocation=True, refuse_after_bytes=0)),
    "resident": ({"mode": "resident"}, HostFaults()),
    "resident, delayed": ({"mode": "resident"}, HostFaults(copies="threaded", copy_delay_s=0.0002)),
    "resident, last moment": ({"mode": "resident"}, HostFaults(copies="last_moment", late_queries=2)),
    "budget": ({"mode": "budget", "budget_bytes": 40_000}, HostFaults()),
    "mapped": ({"mode": "mapped"}, HostFaults()),
    "budget of nothing": ({"mode": "budget", "budget_bytes": 0}, HostFaults()),
    "file, no slots": ({"mode": "budget", "budget_bytes": 0, "expert_cache": 0}, HostFaults()),
    "ring of two": ({"mode": "resident", "ring_slots": 2}, HostFaults()),
    "ring reserved": ({"prefill_borrow": False, "ring_slots": 3}, HostFaults()),
    "a prompt's rare experts on the CPU": ({"mode": "resident", "prefill_cpu_share": 0.5}, HostFaults()),
    "all of a prompt on the CPU": (
        {"prefill_cpu_share": 1.0},
        HostFaults(refuse_one_allocation=True, refuse_at_slice=1),
    ),
    "two buffers": ({"mode": "budget", "budget_bytes": 0, "stager_buffers": 2}, HostFaults(copies="last_moment")),
}


@pytest.mark.parametrize("arm", ARMS)
def test_logits_are_the_oracles(small: Small, arm: str) -> None:
    pack, kernel = small
    changes, faults = ARMS[arm]
    opened = open_system(pack, kernel, faults, adapt_every=1, adapt_swaps=2, **changes)
    try:
        for seed, num_rows in enumerate([1, 7, 100, 3, 600, 1, 1, 65, 64, 1]):
            torch.testing.assert_close(
                opened.forward(seed, num_rows), oracle(pack, kernel, seed, num_rows), rtol=0, atol=0
            )
            opened.system.end_round()
            opened.system.store.check()
        assert opened.backend.statistics().pageable_copies == 0 or faults.refuse_after_bytes == 0
    finally:
        opened.close()
    assert opened.backend.statistics().device_bytes == 0
    assert opened.backend.statistics().pinned_bytes == 0
