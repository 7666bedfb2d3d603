"""Measuring this machine: every number is there and plausible, nothing stays behind, and what was known is kept."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from strata.config import Requested
from strata.engine import calibration, layer_costs
from strata.engine.rates import LayerCosts, Rates
from strata.kernels import rates as kernel_rates
from strata.kernels.cpu import pool
from strata.memory import bandwidth
from tests.engine.test_forecast import BANDWIDTHS, FREE, KERNELS, RATES


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rates, "WORKING_SET", 8 << 20)
    monkeypatch.setattr(kernel_rates, "SWEEPS", 1)
    monkeypatch.setattr(kernel_rates, "LOOK_S", 0.0)
    monkeypatch.setattr(layer_costs, "ROUNDS", 2)
    monkeypatch.setattr(layer_costs, "SLICES", 1)
    monkeypatch.setattr(layer_costs, "PROMPT_ROWS", 96)


def test_bandwidths_are_measured_and_the_file_is_gone(tmp_path: Path) -> None:
    threads = pool.configure(2)
    found = bandwidth.measure_bandwidths(tmp_path, num_threads=threads, size_bytes=64 << 20, passes=1)
    for name, rate in dataclasses.asdict(found).items():
        assert rate is None or 1e7 < rate < 1e13, name
    assert found.cached_read
    assert not os.listdir(tmp_path)


def test_a_full_drive_leaves_the_drive_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "LEAVE_FREE", 1 << 60)
    found = bandwidth.measure_bandwidths(tmp_path, num_threads=pool.configure(1), size_bytes=64 << 20, passes=1)
    assert found.memory_read > 0
    assert (found.cached_read, found.mapped_read, found.drive_sequential, found.drive_pieces) == (None,) * 4


def test_kernels_are_measured_in_every_size() -> None:
    pool.configure(2)
    found = kernel_rates.measure_kernels("nvfp4")
    for table in (*found.experts.values(), *found.linear.values(), found.attention):
        assert len(table) == 2
        assert all(1e6 < rate < 1e15 for by_rows in table.values() for rate in by_rows.values())
    assert set(found.linear) == {"q8_0", "bf16", "f32"}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen4_exp"])
def test_a_layer_of_each_family_is_measured(family: str) -> None:
    costs = layer_costs.measure_layers(family, 2)
    assert 1e-6 < costs.a_round < 1
    assert min(dataclasses.astuple(costs)) >= 0


def test_measuring_keeps_what_was_known_of_other_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    requested = Requested(model="flash-next", threads=2)
    assert calibration.kept_rates(requested) is None
    other = Rates(BANDWIDTHS, KERNELS, {"qwen4_exp": LayerCosts(1, 1, 1, 1, 1, 1)})
    monkeypatch.setattr(calibration, "_measure", lambda *_: RATES)
    calibration.measure_rates(requested)
    monkeypatch.setattr(calibration, "_measure", lambda *_: other)
    found = calibration.measure_rates(requested)
    assert found.layers == {"qwen3_moe": FREE, **other.layers}
    assert calibration.kept_rates(requested) == found
    assert calibration.kept_rates(dataclasses.replace(requested, threads=1)) is None
