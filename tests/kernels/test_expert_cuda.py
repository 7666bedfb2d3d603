"""The GPU's expert kernel against the CPU's, bit for bit: formats, widths, rows, special rows, sums over experts."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import pytest
import torch

from strata.kernels.cpu.experts import ExpertKernel, group_picks
from strata.kernels.cuda.experts import CudaExpertKernel
from strata.quant import ExpertFormat, ExpertLayout
from tests.kernels.expert_mirror import every_scale_with_every_pair_of_codes

pytestmark = pytest.mark.gpu
if shutil.which("nvidia-smi") and importlib.util.find_spec("cuda"):
    from tests.kernels.gpu_memory import Gpu


def pages(blobs: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(blobs.numel() + 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    return raw[start : start + blobs.numel()].view(blobs.shape).copy_(blobs)


def both(
    layout: ExpertLayout, blobs: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, ids: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """[results, sums, flags] as integers from the CPU and from the GPU."""
    rows, k = ids.shape
    weights = torch.rand(rows, k, generator=torch.Generator().manual_seed(7))
    blobs = pages(blobs)
    tasks = group_picks(ids)
    stride = np.arange(len(blobs), dtype=np.uint64) * np.uint64(layout.blob_bytes)
    tasks.place(np.uint64(blobs.data_ptr()) + stride, scales.numpy())
    out = torch.zeros(rows, k, layout.hidden)
    cpu = ExpertKernel(layout)
    flags = cpu.compute(tasks, x, out)
    y = cpu.combine(out, weights, flags)
    gpu = Gpu()
    try:
        kernel = CudaExpertKernel(layout, gpu.architecture)
        tasks.place(np.uint64(gpu.put(blobs.numpy())) + stride, scales.numpy())
        size = kernel.scratch(rows, rows * k)
        codes, factors = gpu.zeros(size.row_codes), gpu.zeros(size.row_scales)
        inner, inner_factors = gpu.zeros(size.pick_codes), gpu.zeros(size.pick_scales)
        result, total, marks = gpu.zeros(out.numel() * 4), gpu.zeros(y.numel() * 4), gpu.zeros(rows)
        kernel.quantise(gpu.put(x.numpy()), rows, codes, factors, marks)
        kernel.compute(
            gpu.put(tasks.tasks.view(np.uint8)), len(tasks.tasks), gpu.put(tasks.rows), gpu.put(tasks.slots),
            codes, factors, inner, inner_factors, result, marks,
        )  # fmt: skip
        kernel.combine(result, gpu.put(weights.numpy()), rows, k, total, marks)
        found = [
            gpu.get(result, tuple(out.shape), np.int32),
            gpu.get(total, tuple(y.shape), np.int32),
            gpu.get(marks, (rows,), np.uint8),
        ]
    finally:
        gpu.close()
    return [out.numpy().view(np.int32), y.numpy().view(np.int32), flags], found


def random_experts(layout: ExpertLayout, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(11)
    wide, tall = (layout.intermediate, layout.hidden), (layout.hidden, layout.intermediate)
    return layout.pack_weights(
        *(torch.randn(experts, *shape, generator=random) * shape[-1] ** -0.5 for shape in (wide, wide, tall))
    )


@pytest.mark.parametrize("format", ["nvfp4", "q8_0"])
@pytest.mark.parametrize(("hidden", "inner"), [(2560, 640), (2048, 768), (100, 37), (64, 16), (200, 130)])
def test_widths_and_rows(format: ExpertFormat, hidden: int, inner: int) -> None:
    layout = ExpertLayout(hidden, inner, format)
    blobs, scales = random_experts(layout, 4)
    for rows in (1, 2, 3, 4, 5, 9):
        x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows))
        ids = np.stack([np.random.default_rng(t).permutation(4)[:3] for t in range(rows)]).astype(np.int32)
        cpu, gpu = both(layout, blobs, scales, x, ids)
        for one, other in zip(cpu, gpu, strict=True):
            assert np.array_equal(one, other), (rows, hidden)


@pytest.mark.parametrize("format", ["nvfp4", "q8_0"])
def test_special_rows(format: ExpertFormat) -> None:
    layout = ExpertLayout(128, 64, format)
    blobs, scales = random_experts(layout, 1)
    x = torch.randn(12, 128, generator=torch.Generator().manual_seed(5))
    x[0], x[1], x[2], x[3, 7], x[7], x[10] = 0.0, -0.0, 1.0, 1e6, 1e-42, 1e38
    x[4] *= 2.0**-98
    x[5] *= 2.0**-103
    x[6] *= 2.0**60
    x[8, 3], x[9, 100] = torch.nan, -torch.inf
    x[11, :16] = torch.arange(16) + 0.5
    cpu, gpu = both(layout, blobs, scales, x, np.zeros((12, 1), np.int32))
    for one, other in zip(cpu, gpu, strict=True):
        assert np.array_equal(one, other)
    assert cpu[2].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_all_e4m3_scales_with_all_pairs_of_codes() -> None:
    layout = ExpertLayout(1024, 64, "nvfp4")
    blobs, scales = layout.pack(*every_scale_with_every_pair_of_codes())
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(8))
    x[1] = 1.0
    cpu, gpu = both(layout, blobs, scales, x, np.zeros((2, 1), np.int32))
    for one, other in zip(cpu, gpu, strict=True):
        assert np.array_equal(one, other)
