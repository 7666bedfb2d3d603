"""The emulation of a GPU itself: turns, shuffles, poison, guards, and the mistakes that it must see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cuda.compile import KernelSource
from tests.emulator import machine as emulation
from tests.emulator.compile import EmulatedSource, load_source
from tests.emulator.machine import EmulatedMachine, EmulatedProgram

SOURCE = r"""
extern "C" __global__ void turns(const int* x, int count, int* out) {
    extern __shared__ int room[];
    __shared__ int totals[32];
    const int i = threadIdx.x, lane = i & 31;
    if (i == 0) out[blockIdx.x * 4 + 3] = totals[5];  // not written yet in this block
    int sum = blockIdx.x * count + i < gridDim.x * count && i < count ? x[blockIdx.x * count + i] : 0;
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (lane == 0) totals[i >> 5] = sum;
    room[i] = lane;
    __syncthreads();
    if (i == 0) {
        int all = 0;
        for (int w = 0; w < blockDim.x / 32; ++w) all += totals[w];
        out[blockIdx.x * 4] = all;
        out[blockIdx.x * 4 + 1] = room[blockDim.x - 1];
    }
    const int odd = __syncthreads_count(i & 1);
    if (i == 0) out[blockIdx.x * 4 + 2] = odd * 1000 + __popc(__ballot_sync(1u, 1));
}
extern "C" __global__ void half_a_barrier(int limit) { if ((int)threadIdx.x < limit) __syncthreads(); }
extern "C" __global__ void half_a_warp(int limit) {
    if ((int)threadIdx.x < limit) __shfl_sync(0xFFFFFFFFu, 1, 0);
}
extern "C" __global__ void beyond_shared(int at) {
    extern __shared__ float room[];
    room[at] = 1.0f;
}
extern "C" __global__ void beyond_memory(float* y, int at) { y[at] = 1.0f; }
extern "C" __global__ void orders(int* last) { if (threadIdx.x < 7) *last = blockIdx.x * 7 + threadIdx.x; }
extern "C" __global__ void words(unsigned a, unsigned b, unsigned* out) {
    unsigned c;
    asm("prmt.b32 %0, %1, %2, 0xD9C8;" : "=r"(c) : "r"(a), "r"(b));
    out[0] = c;
    out[1] = __byte_perm(a, b, 0x7531);
    out[2] = __dp4a((int)a, (int)b, 5);
}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmulatedProgram]:
    found: EmulatedSource = load_source(KernelSource("emulation_test", SOURCE.encode(), {}))
    monkeypatch.setattr(emulation, "load", lambda _: found)

    def go(program: EmulatedProgram, *launch: object, backward: bool = False, shared: int = 0) -> EmulatedProgram:
        entry, grid, block, *arguments = launch
        program.launch(f"x.{entry}", grid, block, *arguments, shared=shared)  # type: ignore[arg-type]
        machine = EmulatedMachine(backward=backward)
        machine.prepare(program.take()).run()
        machine.synchronize()
        return program

    return go


def test_threads_meet_at_barriers_and_shuffles(run: Callable[..., EmulatedProgram]) -> None:
    program, x = EmulatedProgram(), torch.arange(180, dtype=torch.int32)
    out = program.empty(2, 4, dtype=torch.int32)
    for backward in (False, True):
        run(program, "turns", (2,), 96, x, 90, out, shared=96 * 4, backward=backward)
        assert out[:, 0].tolist() == [int(x[:90].sum()), int(x[90:].sum())]
        assert out[:, 1:].tolist() == [[31, 48001, -1]] * 2, "shared memory starts poisoned in every block"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [("half_a_barrier", "40 wait at __syncthreads, 0 in a warp"), ("half_a_warp", "8 in a warp")],
)
def test_what_not_all_reach_is_an_error(run: Callable[..., EmulatedProgram], entry: str, complaint: str) -> None:
    run(EmulatedProgram(), entry, (2,), 64, 64)
    with pytest.raises(EngineError, match=f"{entry}: block .0, 0, 0.: a barrier is not reached by all.*{complaint}"):
        run(EmulatedProgram(), entry, (2,), 64, 40)


def test_lanes_that_do_not_exist(run: Callable[..., EmulatedProgram]) -> None:
    with pytest.raises(EngineError, match="a lane that does not exist"):
        run(EmulatedProgram(), "half_a_warp", (1,), 16, 16)


def test_writes_past_an_end(run: Callable[..., EmulatedProgram]) -> None:
    run(EmulatedProgram(), "beyond_shared", (1,), 1, 9, shared=40)
    with pytest.raises(EngineError, match="past the dynamic shared memory"):
        run(EmulatedProgram(), "beyond_shared", (1,), 1, 10, shared=40)
    program = EmulatedProgram()
    y = program.empty(5)
    assert torch.isnan(y).all(), "new memory is poisoned"
    run(program, "beyond_memory", (1,), 1, y, 4).check_guards()
    with pytest.raises(AssertionError, match="past a tensor of 20 bytes"):
        run(program, "beyond_memory", (1,), 1, y, 5).check_guards()


def test_arguments_must_agree(run: Callable[..., EmulatedProgram]) -> None:
    program = EmulatedProgram()
    with pytest.raises(EngineError, match="arguments are 'pf', the kernel takes 'pi'"):
        run(program, "beyond_memory", (1,), 1, program.empty(5), 4.0)
    with pytest.raises(EngineError, match="arguments are 'p', the kernel takes 'pi'"):
        run(program, "beyond_memory", (1,), 1, program.empty(5))


def test_order_of_blocks_and_threads_can_be_turned(run: Callable[..., EmulatedProgram]) -> None:
    program = EmulatedProgram()
    last = program.empty(1, dtype=torch.int32)
    run(program, "orders", (3,), 32, last)
    assert last.item() == 20
    run(program, "orders", (3,), 32, last, backward=True)
    assert last.item() == 0


def test_integer_words(run: Callable[..., EmulatedProgram]) -> None:
    program = EmulatedProgram()
    out = program.empty(3, dtype=torch.int32)
    run(program, "words", (1,), 1, 0x01820304, -0x7F000080, out)  # 0x80FFFF80
    # Bytes of (b, a), highest first: 80 FF FF 80 | 01 82 03 04. The selector's top bit asks for a byte's sign.
    assert out[0].item() & 0xFFFFFFFF == 0xFF00FF00
    assert out[1].item() & 0xFFFFFFFF == 0x80FF0103
    assert out[2].item() == 5 + 4 * -128 + 3 * -1 + -126 * -1 + 1 * -128
