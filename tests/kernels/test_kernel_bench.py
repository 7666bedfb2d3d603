"""The benchmark of the expert kernel: every figure is there, against its ceiling, and threads share the work."""

from __future__ import annotations

import pytest

from strata.errors import ConfigError
from strata.kernels import bench
from strata.kernels.bench import bench_kernels, describe


def test_a_small_run_gives_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_GIB", 4 << 20)  # stands for the GiB whose sum is measured beside the whole
    record = bench_kernels(gib=0.02, threads=2, repeats=2, hidden=256, intermediate=128)
    kernels = ("cpu_expert_kernel", "cpu_expert_kernel_4rows")
    busy = [f"{name}_{end}_busy" for name in kernels for end in ("least", "most")]
    assert list(record.figures) == ["plain_sum", "plain_sum_1gib", *kernels, *busy]
    whole = record.figures["plain_sum"]
    assert whole.ceiling is None
    for name in kernels:
        figure = record.figures[name]
        assert figure.value > 0
        assert figure.ceiling == whole.value
        assert figure.percent is not None
        least, most = (record.figures[f"{name}_{end}_busy"].value for end in ("least", "most"))
        assert 0 <= least <= 100 <= most <= 200
    lines = describe(record)
    assert len(lines) == 8
    assert f"% of a plain sum's {whole.value:.2f}" in lines[2]


def test_no_less_is_read_than_was_asked() -> None:
    record = bench_kernels(gib=0.0201, threads=1, rows=(1,), repeats=1, hidden=2560, intermediate=640)
    assert list(record.figures)[:2] == ["plain_sum", "cpu_expert_kernel"]
    assert record.figures["cpu_expert_kernel_least_busy"].value == 100.0
    assert record.machine["experts_gib"] == 0.02  # eight experts of 2,764,800 bytes, where seven are less than asked


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ConfigError):
        bench_kernels(gib=0)
    with pytest.raises(ConfigError, match="RAM are free"):
        bench_kernels(gib=1e6)
