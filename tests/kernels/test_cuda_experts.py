"""The expert kernels of a round on the emulated card against the CPU's, bit for bit: formats, widths, rows of a task.

Also what a launch is: how blocks are cut, and that none takes more threads than the kernels are compiled for.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.cpu.experts import ExpertKernel, group_picks
from strata.kernels.cuda.experts import down_launch, gate_up_launch, shape_of
from strata.kernels.cuda.program import Address
from strata.quant import ExpertFormat, ExpertLayout, QuantisedMatrix
from tests.emulator.machine import EmulatedMachine, EmulatedProgram
from tests.kernels.expert_mirror import every_scale_with_every_pair_of_codes

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "q8_0", "bf16")


def random_experts(layout: ExpertLayout, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(11)
    wide, tall = (layout.intermediate, layout.hidden), (layout.hidden, layout.intermediate)
    return layout.pack_weights(
        *(torch.randn(experts, *shape, generator=random) * shape[-1] ** -0.5 for shape in (wide, wide, tall))
    )


def pages(blobs: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(blobs.numel() + 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    return raw[start : start + blobs.numel()].view(blobs.shape).copy_(blobs)


def same(
    layout: ExpertLayout, blobs: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, ids: np.ndarray,
    *, backward: bool = False, idle: int = 2,
) -> np.ndarray:  # fmt: skip
    """Asserts that results and flags are the CPU's; the flags. ``idle`` tasks of the grid are not there."""
    rows, k = ids.shape
    blobs = pages(blobs)
    tasks = group_picks(ids)
    stride = np.arange(len(blobs), dtype=np.uint64) * np.uint64(layout.blob_bytes)
    tasks.place(np.uint64(blobs.data_ptr()) + stride, scales.numpy())
    wanted = torch.zeros(rows * k, layout.hidden)
    wanted_flags = ExpertKernel(layout).compute(tasks, x, wanted)

    program, shape, machine = EmulatedProgram(), shape_of(layout), EmulatedMachine(backward=backward)
    number = len(tasks.tasks)
    list_of_tasks = program.empty(number + idle, tasks.tasks.itemsize, dtype=torch.uint8)
    list_of_tasks[:number] = torch.from_numpy(tasks.tasks.view(np.uint8).reshape(number, -1).copy())
    num_tasks = torch.tensor([number], dtype=torch.int32)
    pick_rows, slots = torch.from_numpy(tasks.rows), torch.from_numpy(tasks.slots)
    flags = program.zeros(rows, dtype=torch.uint8)
    inner = program.zeros(rows * k, shape.narrow * 64, dtype=torch.float32 if layout.format == "bf16" else torch.int8)
    inner_scales = program.zeros(rows * k, shape.narrow * 4)
    out = program.empty(rows * k, layout.hidden)
    if layout.format == "bf16":
        given: tuple[torch.Tensor, ...] = (x,)
        kept: tuple[torch.Tensor, ...] = (inner,)
    else:
        codes = program.empty(rows, shape.wide * 64, dtype=torch.int8)
        factors = program.empty(rows, shape.wide * 4)
        program.launch("expert.quantise_rows", (rows,), 64, x, layout.hidden, shape.wide * 64, codes, factors, flags)
        given, kept = (codes, factors), (inner, inner_scales)
    one, other = gate_up_launch(shape), down_launch(shape)
    program.launch(
        f"expert.{layout.format}_gate_up", (one.blocks, number + idle), one.threads, shape, list_of_tasks, pick_rows,
        *given, *kept, flags, num_tasks if idle else Address(0), shared=one.shared,
    )  # fmt: skip
    program.launch(
        f"expert.{layout.format}_down", (other.blocks, number + idle), other.threads, shape, list_of_tasks, pick_rows,
        slots, *kept, out, flags, num_tasks if idle else Address(0), shared=other.shared,
    )  # fmt: skip
    machine.prepare(program.take()).run()
    machine.synchronize()
    program.check_guards()
    assert np.array_equal(out.numpy().view(np.int32), wanted.numpy().view(np.int32))
    assert np.array_equal(flags.numpy(), wanted_flags)
    return wanted_flags


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "inner"),
    # Superblocks of a row: one, odd, even; more segments than a block has warps; odd groups of down; no whole groups.
    [(64, 16), (100, 37), (192, 64), (256, 128), (200, 330), (1344, 48), (48, 1088)],
)
def test_widths(format: ExpertFormat, hidden: int, inner: int) -> None:
    layout = ExpertLayout(hidden, inner, format)
    blobs, scales = random_experts(layout, 4)
    for rows in (1, 3):
        x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows))
        ids = np.stack([np.random.default_rng(t).permutation(4)[:3] for t in range(rows)]).astype(np.int32)
        same(layout, blobs, scales, x, ids, backward=rows == 3, idle=rows - 1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", range(1, 10))
def test_rows_of_one_task(format: ExpertFormat, rows: int) -> None:
    layout = ExpertLayout(320, 80, format)
    blobs, scales = random_experts(layout, 2)
    x = torch.randn(rows, 320, generator=torch.Generator().manual_seed(rows))
    ids = np.zeros((rows, 1), np.int32)
    same(layout, blobs, scales, x, ids, backward=rows % 2 == 0)
    ids[-1] = 1  # and one row by itself, which is not row 0
    same(layout, blobs, scales, x, ids)


def test_the_widths_of_a_large_model() -> None:
    layout = ExpertLayout(2560, 640, "nvfp4")
    blobs, scales = random_experts(layout, 2)
    same(
        layout,
        blobs,
        scales,
        torch.randn(2, 2560, generator=torch.Generator().manual_seed(2)),
        np.array([[0], [1]], np.int32),
    )


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
    flags = same(layout, blobs, scales, x, np.zeros((12, 1), np.int32))
    assert flags.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_all_e4m3_scales_with_all_pairs_of_codes() -> None:
    layout = ExpertLayout(1024, 64, "nvfp4")
    blobs, scales = layout.pack(*every_scale_with_every_pair_of_codes())
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(8))
    x[1] = 1.0
    same(layout, blobs, scales, x, np.zeros((2, 1), np.int32))


def test_extreme_codes() -> None:
    """The largest dot products there are, of both signs: 16 x -128 x 127."""
    codes = torch.full((1, 64, 128), -128, dtype=torch.int8)
    codes[:, ::2] = 127
    factors = torch.full((1, 64, 4), 2.0**-9, dtype=torch.float16)
    ones = torch.ones(1)
    gate = QuantisedMatrix("q8_0", 128, codes, factors, ones)
    down = QuantisedMatrix("q8_0", 64, codes.view(1, 128, 64), factors.view(1, 128, 2), ones)
    layout = ExpertLayout(128, 64, "q8_0")
    blobs, scales = layout.pack(gate, gate, down)
    x = torch.ones(4, 128)
    x[1] = -1.0
    x[2] *= 2.0**-90
    x[3, ::3] = -1.0
    same(layout, blobs, scales, x, np.zeros((4, 1), np.int32))


@pytest.mark.parametrize(
    ("hidden", "inner", "wanted"),
    [
        (2560, 640, ((40, 160), (40, 160))),
        (2048, 768, ((48, 128), (32, 192))),
        (256, 128, ((8, 64), (4, 64))),
        (7168, 2048, ((128, 320), (224, 256))),
    ],
)
def test_launches(hidden: int, inner: int, wanted: tuple[tuple[int, int], tuple[int, int]]) -> None:
    shape = shape_of(ExpertLayout(hidden, inner, "nvfp4"))
    launches = (gate_up_launch(shape), down_launch(shape))
    assert tuple((launch.blocks, launch.threads) for launch in launches) == wanted
    assert max(launch.shared for launch in launches) < (96 << 10)
