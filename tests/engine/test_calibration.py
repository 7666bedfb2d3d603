"""Measuring this machine: every number is there and plausible, nothing stays behind, and what was known is kept."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from strata.config import Requested
from strata.engine import calibration, file_costs, layer_costs
from strata.engine.forecast import unmeasured
from strata.engine.plan_report import plan_subject
from strata.engine.plan_subject import find_subject
from strata.engine.rates import FileCosts, LayerCosts, Rates, kept_rates, rates_key, read_rates, write_rates
from strata.errors import CheckpointError, ConfigError
from strata.experts.source import BlobPlace
from strata.kernels import rates as kernel_rates
from strata.kernels.cpu import pool
from strata.kernels.cpu.checksum import checksum
from strata.memory import bandwidth
from strata.memory.probe import Machine
from strata.models.known_shapes import KNOWN_SHAPES, PROBE_SHAPES
from strata.paths import find_home
from strata.quant import ExpertLayout
from tests.engine.test_forecast import BANDWIDTHS, FREE, KERNELS, RATES


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rates, "WORKING_SET", 8 << 20)
    monkeypatch.setattr(kernel_rates, "SWEEPS", 1)
    monkeypatch.setattr(kernel_rates, "LOOK_S", 0.0)
    monkeypatch.setattr(layer_costs, "ROUNDS", 2)
    monkeypatch.setattr(layer_costs, "SLICES", 1)
    monkeypatch.setattr(layer_costs, "PROMPT_ROWS", 96)
    monkeypatch.setattr(file_costs, "SWEEPS", 2)
    monkeypatch.setattr(file_costs, "LARGE", (512, 256))


def test_bandwidths_are_measured_and_the_file_is_gone(tmp_path: Path) -> None:
    threads = pool.configure(2)
    found = bandwidth.measure_bandwidths(tmp_path, num_threads=threads, num_cpus=2, size_bytes=64 << 20, passes=1)
    for name, rate in dataclasses.asdict(found).items():
        assert name == "stager_threads" or rate is None or 1e7 < rate < 1e13, name
    assert found.mapped_read
    assert found.stager_threads == 4
    assert not os.listdir(tmp_path)


def test_a_full_drive_leaves_the_drive_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "LEAVE_FREE", 1 << 60)
    found = bandwidth.measure_bandwidths(tmp_path, num_threads=pool.configure(1), num_cpus=1, size_bytes=64 << 20)
    assert found.memory_read > 0
    assert (found.mapped_read, found.drive_pieces) == (None, None)


@pytest.mark.parametrize(
    ("cpus", "rates", "expected"),
    [
        (2, {4: 10}, 4),
        (16, {4: 27, 6: 33, 8: 40, 12: 50, 16: 51}, 12),
        (16, {4: 27, 6: 27.5, 8: 90}, 4),  # the first step that gains too little ends it
        (8, {4: 10, 6: 11, 8: 12}, 8),
        (48, {8: 10, 12: 20, 16: 30}, 16),
    ],
)
def test_stager_threads_rise_while_staging_gets_faster(cpus: int, rates: dict[int, float], expected: int) -> None:
    assert bandwidth.choose_stager_threads(cpus, rates.__getitem__) == expected


def test_a_layer_waits_for_what_it_reads_and_nothing_stays_behind(tmp_path: Path) -> None:
    layout = ExpertLayout(64, 64, "nvfp4")
    found = file_costs.measure_file(tmp_path, layout, (), pool.configure(2))
    assert found is not None
    for costs in (found.cached, found.drive or found.cached):
        assert len(costs) == 2
        assert all(set(by) == set(file_costs.READS) for by in costs.values())
        assert all(0 <= seconds < 1 for by in costs.values() for seconds in by.values())
        assert max(costs[max(costs)].values()) > 0
    assert not os.listdir(tmp_path)


def test_experts_of_a_model_that_is_here_are_read_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack with a damaged blob: who reads the model's own file finds it."""
    monkeypatch.setattr(file_costs, "LARGE_BYTES", 1)
    layout = ExpertLayout(64, 64, "nvfp4")
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(17 * layout.blob_bytes))
    sum_of_zeros = checksum(bytes(layout.blob_bytes))
    places = [BlobPlace(path, index * layout.blob_bytes, layout.blob_bytes, sum_of_zeros) for index in range(17)]
    found = file_costs.measure_file(tmp_path, layout, places, pool.configure(2))
    assert found is not None
    assert layout.blob_bytes in found.cached
    path.write_bytes(b"x" + bytes(17 * layout.blob_bytes - 1))
    with pytest.raises(CheckpointError, match="checksum"):
        file_costs.measure_file(tmp_path, layout, places, pool.configure(2))


def test_a_full_drive_leaves_the_file_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "LEAVE_FREE", 1 << 60)
    assert file_costs.measure_file(tmp_path, ExpertLayout(64, 64, "nvfp4"), (), pool.configure(1)) is None


def test_rates_of_a_file_are_kept_as_they_were_found() -> None:
    key = rates_key(2)
    both = {100: {1: 0.5, 2: 0.75}, 200: {1: 0.5}}
    for file in (None, FileCosts(both, None), FileCosts(both, {100: {1: 2.0}, 300: {4: 1.0}})):
        rates = dataclasses.replace(RATES, file=file)
        write_rates(find_home().make(find_home().calibration), key, rates)
        assert read_rates(find_home().calibration, key) == rates


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
    assert kept_rates(requested) is None
    other = Rates(BANDWIDTHS, KERNELS, {"qwen4_exp": LayerCosts(1, 1, 1, 1)}, None)
    monkeypatch.setattr(calibration, "_measure", lambda *_: RATES)
    calibration.measure_rates(requested)
    monkeypatch.setattr(calibration, "_measure", lambda *_: other)
    found = calibration.measure_rates(requested)
    assert found.layers == {"qwen3_moe": FREE, **other.layers}
    assert kept_rates(requested) == found
    assert kept_rates(dataclasses.replace(requested, threads=1)) is None


def test_layers_of_every_family_are_measured_in_one_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured for the built-in model serves all known shapes."""
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setattr(bandwidth, "LEAVE_FREE", 1 << 60)  # the drive has a test of its own
    found = calibration.measure_rates(Requested(threads=2))
    assert set(found.layers) == set(PROBE_SHAPES)
    for name in KNOWN_SHAPES:
        assert unmeasured(found, find_subject(name, "bf16")) == []
    assert kept_rates(Requested(threads=2)) == found


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_nothing_is_measured_where_nothing_can_be_kept(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured in vain"))
    with monkeypatch.context() as inner:
        inner.setattr(Path, "touch", lambda *_, **__: raise_error(number))
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            calibration.measure_rates(Requested(threads=2))
    assert "STRATA_HOME" in caught.value.hint
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be created"):
        calibration.measure_rates(Requested(threads=2))


@pytest.mark.parametrize(("number", "wayout"), [(errno.ENOSPC, "free some disk"), (errno.EIO, "set STRATA_HOME")])
def test_what_cannot_be_kept_is_returned_and_one_line_says_so(
    number: int, wayout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_measure", lambda *_: RATES)
    monkeypatch.setattr("strata.files.os.fsync", lambda _: raise_error(number))
    assert calibration.measure_rates(Requested(threads=2)) == RATES
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert os.strerror(number) in record.getMessage()
    assert wayout in record.getMessage()
    assert os.listdir(tmp_path / "calibration") == []


def test_a_full_drive_does_not_keep_the_measuring_from_beginning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_measure", lambda *_: RATES)
    monkeypatch.setattr(Path, "touch", lambda *_, **__: raise_error(errno.ENOSPC))
    assert calibration.measure_rates(Requested(threads=2)) == RATES


def raise_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_plans_take_the_threads_of_staging_that_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    requested = Requested(model="flash-next", threads=2)
    subject = find_subject("flash-next", "bf16")
    machine = Machine("", 16, 256 << 30, 256 << 30, "free RAM", None, (), ())
    assert plan_subject(subject, requested, machine).stager.num_threads == 4
    found = dataclasses.replace(RATES, bandwidths=dataclasses.replace(BANDWIDTHS, stager_threads=12))
    monkeypatch.setattr(calibration, "_measure", lambda *_: found)
    calibration.measure_rates(requested)
    assert plan_subject(subject, requested, machine).stager.num_threads == 12
    asked = dataclasses.replace(requested, stager_threads=3)
    assert plan_subject(subject, asked, machine).stager.num_threads == 3
