"""The rows benchmark: its matrices are what they say, and it measures each figure against a ceiling."""

from __future__ import annotations

import numpy as np
import pytest

from strata.errors import ConfigError
from strata.kernels.cpu import pool
from strata.kernels.row_bench import bench_rows, matrices_in


def test_matrices_fill_the_memory_and_are_finite() -> None:
    memory = np.full(5 * 64 * 64 * 2 + 100, 255, np.uint8)
    for format, count in (("bf16", 5), ("q8_0", 9)):
        matrices = matrices_in(memory, format, 64)
        assert len(matrices) == count
        for matrix in matrices:
            assert (matrix.rows, matrix.columns, matrix.format) == (64, 64, format)
            assert matrix.data.float().isfinite().all()
            assert matrix.scales is None or matrix.scales.float().isfinite().all()


def test_a_small_run_gives_every_figure() -> None:
    threads = pool.threads()
    try:
        record = bench_rows(gib=0.002, threads=1, size=256, repeats=1, command="rows")
    finally:
        pool.configure(threads)
    names = {f"cpu_dense_{f}{rows}" for f in ("bf16", "q8_0") for rows in ("", "_4rows", "_512rows")}
    assert set(record.figures) == names
    assert all(figure.value > 0 and figure.ceiling for figure in record.figures.values())


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ConfigError):
        bench_rows(gib=1.0, size=100, command="rows")
    with pytest.raises(ConfigError):
        bench_rows(gib=0.0001, size=2560, command="rows")
