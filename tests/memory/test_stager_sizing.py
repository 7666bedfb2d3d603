"""The sizing rules of the prompt stream, as the memory guide states them."""

from __future__ import annotations

import pytest

from strata.memory.requests import MemoryRequest, RamMode
from strata.memory.stager_sizing import size_stager


@pytest.mark.parametrize(
    ("mode", "share", "cpus", "expected"),
    [
        ("arena", 0.0, 16, (4, 16, 384)),
        ("arena", 0.10, 64, (4, 16, 384)),
        ("arena", 0.11, 16, (4, 64, 384)),
        ("arena", 1.0, 24, (6, 64, 384)),
        ("resident", 1.0, 64, (8, 64, 384)),
        ("budget", 0.05, 64, (4, 16, 384)),
        ("budget", 0.5, 64, (4, 16, 96)),
        ("mapped", 1.0, 64, (4, 16, 96)),
    ],
)
def test_rules(mode: RamMode, share: float, cpus: int, expected: tuple[int, int, int]) -> None:
    sizing = size_stager(MemoryRequest(ram_bytes=1, num_cpus=cpus), mode, unpinned_share=share)
    assert (sizing.num_threads, sizing.num_buffers, sizing.ring_slots) == expected


def test_fused_kernels_take_a_larger_ring() -> None:
    request = MemoryRequest(ram_bytes=1, fused_kernels=True)
    assert size_stager(request, "arena", unpinned_share=0.0).ring_slots == 1024


def test_the_old_and_the_new_sizing_can_be_forced() -> None:
    old = MemoryRequest(ram_bytes=1, num_cpus=64, stage_resident=False)
    assert size_stager(old, "arena", unpinned_share=1.0).num_buffers == 16
    new = MemoryRequest(ram_bytes=1, num_cpus=64, stage_resident=True)
    assert size_stager(new, "arena", unpinned_share=0.0).num_buffers == 64
    for request in (old, new):
        assert "STRATA_STAGE_RESIDENT" in size_stager(request, "arena", unpinned_share=0.5).reason


def test_what_was_measured_raises_the_threads_of_staging_from_ram_alone() -> None:
    measured = MemoryRequest(ram_bytes=1, num_cpus=16, measured_threads=12)
    sizing = size_stager(measured, "arena", unpinned_share=1.0)
    assert (sizing.num_threads, sizing.num_buffers) == (12, 64)
    assert "measured" in sizing.reason
    assert size_stager(measured, "arena", unpinned_share=0.1).num_threads == 4
    assert size_stager(measured, "budget", unpinned_share=1.0).num_threads == 4
    fewer = MemoryRequest(ram_bytes=1, num_cpus=64, measured_threads=4)
    assert size_stager(fewer, "arena", unpinned_share=1.0).num_threads == 8
    asked = MemoryRequest(ram_bytes=1, num_cpus=16, measured_threads=12, stager_threads=3)
    assert size_stager(asked, "arena", unpinned_share=1.0).num_threads == 3


def test_variables_win_over_every_rule() -> None:
    request = MemoryRequest(ram_bytes=1, num_cpus=64, stager_threads=3, stager_buffers=5, ring_slots=7)
    sizing = size_stager(request, "mapped", unpinned_share=1.0)
    assert (sizing.num_threads, sizing.num_buffers, sizing.ring_slots) == (3, 5, 7)
    assert "STRATA_STAGER_THREADS" in sizing.reason
