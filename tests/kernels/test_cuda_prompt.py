"""Kernels of a prompt's chunk, emulated, against float64 and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from strata.kernels.cuda.program import Launch
from strata.kernels.cuda.prompt.calls import PlainCalls
from strata.kernels.cuda.prompt.experts import ChunkExperts
from strata.kernels.cuda.prompt.frame import Frame, frames_of
from strata.kernels.cuda.prompt.ops import DenseWeights, PromptOps
from strata.kernels.ops import DeltaRows, HyperWeights
from strata.kernels.reference import ReferenceOps, sparse
from strata.kernels.reference.delta import recurrent_delta
from strata.kernels.reference.ops import dense_weight
from strata.quant.layout import ExpertLayout
from tests.emulator.machine import EmulatedMachine
from tests.kernels.cuda_runs import random_matrix

CPU = torch.device("cpu")


def launcher(*, backward: bool = False) -> Any:
    machine = EmulatedMachine(backward=backward)

    def launch(launches: list[Launch]) -> None:
        machine.prepare(launches).run()
        machine.synchronize()

    return launch


def ops_of(frame: Frame) -> PromptOps:
    return PromptOps(frame, PlainCalls(), DenseWeights(), launcher())


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class Experts:
    """Random experts of one layer with the picks of some rows."""

    def __init__(self, format: Any, hidden: int, inner: int, experts: int, rows: int, top_k: int) -> None:
        self.layout = ExpertLayout(hidden, inner, format)
        gate, up = noise(1, experts, inner, hidden) * hidden**-0.5, noise(2, experts, inner, hidden) * hidden**-0.5
        down = noise(3, experts, hidden, inner) * inner**-0.5
        self.blobs, self.scales = self.layout.pack_weights(gate, up, down)
        self.x = noise(4, rows, hidden).bfloat16()
        random = torch.Generator().manual_seed(5)
        self.ids = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(rows)]).int()
        self.ids[rows // 2] = -1  # a row of padding
        self.weights = torch.rand(rows, top_k, generator=random)

    def compute(self, rows: slice, order: list[int], waves: list[int], *, backward: bool = False) -> torch.Tensor:
        """y of these rows alone; experts in this order, cut into waves."""
        ids, weights = self.ids[rows].contiguous(), self.weights[rows].contiguous()
        chunk = ChunkExperts(self.layout, len(ids), ids.shape[1], CPU, 3)
        chunk.x_CH[:, : self.layout.hidden] = self.x[rows]
        addresses = [self.blobs.data_ptr() + expert * self.layout.blob_bytes for expert in order]
        chunk.begin_layer(ids, torch.tensor(order, dtype=torch.int32), torch.tensor(addresses), self.scales)
        y = torch.full((len(ids), self.layout.hidden), torch.nan)
        launch = launcher(backward=backward)
        for first, stop in zip(waves, [*waves[1:], len(order)], strict=True):
            launch(chunk.wave(first, stop))
        launch(chunk.sums(ids, weights, y))
        return y

    def exact(self) -> torch.Tensor:
        gate, up, down = (part.double() for part in self.layout.dequantise(self.blobs, self.scales))
        y = torch.zeros(len(self.x), self.layout.hidden, dtype=torch.float64)
        for row, ids in enumerate(self.ids.tolist()):
            for expert, weight in zip(ids, self.weights[row].double(), strict=True):
                if expert >= 0:
                    x = self.x[row].double()
                    y[row] += weight * (down[expert] @ (functional.silu(gate[expert] @ x) * (up[expert] @ x)))
        return y


@pytest.mark.parametrize("format", ["nvfp4", "q8_0", "bf16"])
@pytest.mark.parametrize(("hidden", "inner"), [(192, 48), (80, 272)])
def test_experts_are_those_of_float64_but_for_two_roundings_to_bf16(format: str, hidden: int, inner: int) -> None:
    experts = Experts(format, hidden, inner, 5, 90, 3)
    found = experts.compute(slice(0, 90), list(range(5)), [0])
    assert error(found, experts.exact()) < 2.0**-8
    assert not found[45].any(), "a row without experts"


@pytest.mark.parametrize("format", ["nvfp4", "q8_0", "bf16"])
def test_a_rows_experts_are_the_same_bits_in_any_company(format: str) -> None:
    experts = Experts(format, 128, 64, 4, 150, 2)
    expected = experts.compute(slice(0, 150), [0, 1, 2, 3], [0])
    other = experts.compute(slice(0, 150), [2, 0, 3, 1], [0, 1, 3], backward=True)
    assert torch.equal(other, expected)
    for rows in (slice(3, 4), slice(40, 149)):
        assert torch.equal(experts.compute(rows, [3, 1, 0, 2], [0, 2]), expected[rows])


def test_expanded_nvfp4_is_its_codes_times_scales() -> None:
    """Without the tensor scales, and 2^-8 of it."""
    experts = Experts("nvfp4", 128, 64, 3, 1, 1)
    layout, ones = experts.layout, torch.ones(3, 3)
    gate, up, down = (part.bfloat16() for part in layout.dequantise(experts.blobs, ones))
    addresses = torch.tensor([experts.blobs.data_ptr() + expert * layout.blob_bytes for expert in range(3)])
    wide, narrow = torch.empty(3, 8, 16, 128, dtype=torch.bfloat16), torch.empty(3, 128, 64, dtype=torch.bfloat16)
    launch = launcher()
    for before, units, superblocks, out in ((0, 16, 2, wide), (16 * 576, 8, 1, narrow)):
        grid = (units // 4, 3, 1)
        arguments = (addresses, before, units, superblocks, out)
        launch([Launch("expand_prompt.expand_nvfp4", grid, 256, 0, arguments)])
    assert torch.equal(wide[:, 0::2].reshape(3, 64, 128) * 256, gate)
    assert torch.equal(wide[:, 1::2].reshape(3, 64, 128) * 256, up)
    assert torch.equal(narrow * 256, down)


def test_a_weight_that_no_bf16_holds_is_exact_in_nvfp4() -> None:
    """Every product of a code and a scale, the smallest and the largest, one weight at a time."""
    layout = ExpertLayout(64, 16, "nvfp4")
    codes = torch.arange(16, dtype=torch.uint8)
    for scale in (1, 7, 8, 0x38, 0x7E):
        blobs = torch.zeros(1, layout.blob_bytes, dtype=torch.uint8)
        quantised = layout.unpack(blobs, torch.ones(1, 3))
        gate, up, down = quantised
        gate.codes[0, :, :8] = codes[0::2] | codes[1::2] << 4
        gate.scales[0] = scale
        up.codes[0, :, 0], up.scales[0] = 2, 0x38  # one, at the first weight
        down.codes[0, 0, 0], down.scales[0] = 2, 0x38
        packed, scales = layout.pack(gate, up, down)
        weights = layout.dequantise(packed, scales)[0][0, 0, :16]
        chunk = ChunkExperts(layout, 16, 1, CPU, 1)
        chunk.x_CH[torch.arange(16), torch.arange(16)] = 1.0
        ids = torch.zeros(16, 1, dtype=torch.int32)
        chunk.begin_layer(ids, ids[0], torch.tensor([packed.data_ptr()]), scales)
        launch = launcher()
        launch(chunk.wave(0, 1)[:1])
        up_of_row = torch.zeros(16)
        up_of_row[0] = 1.0
        expected = (functional.silu(weights.double()) * up_of_row).bfloat16()
        assert torch.equal(chunk._inner[:, 0], expected)


@pytest.mark.parametrize(("widths", "rows"), [((16, 24), (5, 38)), ((40, 16), (0, 40)), ((128, 128), (7, 20))])
def test_the_delta_rule_is_the_recurrence_over_the_rows_that_are_new(
    widths: tuple[int, int], rows: tuple[int, int]
) -> None:
    (key_width, value_width), (first, stop), count = widths, rows, 40
    q = functional.normalize(noise(1, count, 2, key_width), dim=-1)
    k = functional.normalize(noise(2, count, 2, key_width), dim=-1)
    delta = DeltaRows(k, noise(3, count, 4, value_width), noise(4, count, 4).sigmoid(), -noise(5, count, 4).abs())
    state = noise(6, 4, key_width, value_width)
    parts = (q, delta.k_TGD, delta.v_TNV, delta.beta_TN, delta.g_TN)
    expected, after = recurrent_delta(*(part[None, first:stop] for part in parts), state[None])
    whole, cut = state.clone(), state.clone()
    found = ops_of(Frame(0, count, first, stop)).gated_delta(q, delta, whole, None, write=True)
    assert expected is not None
    assert float((found[first:stop] - expected[0]).abs().max()) < 1e-5
    assert float((whole - after[0]).abs().max()) < 1e-5
    middle = (first + stop) // 2  # in two parts: the same bits
    one = ops_of(Frame(0, count, first, middle)).gated_delta(q, delta, cut, None, write=True)
    two = ops_of(Frame(0, count, middle, stop)).gated_delta(q, delta, cut, None, write=True)
    assert torch.equal(torch.cat((one[first:middle], two[middle:stop])), found[first:stop])
    assert torch.equal(cut, whole)


@pytest.mark.parametrize(
    ("start", "heads", "groups", "width", "most", "first", "stop"),
    [(64, 6, 2, 16, 5, 3, 60), (96, 4, 2, 256, 8, 0, 64), (1024, 12, 1, 64, 30, 62, 64), (0, 4, 4, 40, 9, 0, 64)],
)
def test_selected_blocks_and_attention_over_them(
    start: int, heads: int, groups: int, width: int, most: int, first: int, stop: int
) -> None:
    rows, block = 64, 4
    index_q, index_k = noise(1, rows, 2, 8), noise(2, (start + rows) // block, 8)
    index_k[::3] = -index_k[::3].abs()
    index_q[::2] = index_q[::2].abs()  # scores of zero: ties at the cut-off
    q, k, v = noise(3, rows, heads, width), noise(4, start + rows, groups, width), noise(5, start + rows, groups, width)
    k, v, new = k.bfloat16(), v.bfloat16(), slice(first, stop)
    ops = ops_of(Frame(start, rows, first, stop))
    listed = ops.select_blocks(index_q, index_k, start, block, most)
    expected = sparse.select_blocks(index_q, index_k, start, block, most)
    assert torch.equal(listed[new], expected[new])
    found = ops.sparse_attention(q, k, v, start, width**-0.5, listed, block)
    exact = sparse.gathered_attention(q.bfloat16().float(), k, v, start, width**-0.5, expected, block)
    assert error(found[new], exact[new]) < 2.0**-8
    assert not found[:first].any()


def test_streams_and_convolutions_are_the_references() -> None:
    ops, reference = ops_of(Frame(0, 40, 5, 38)), ReferenceOps()
    x = noise(1, 40, 4, 50)
    matrices = (random_matrix(12, 200, "f32"), random_matrix(200, 12, "f32"), random_matrix(4, 200, "f32"))
    weights = HyperWeights(noise(2, 4, 50), *matrices, 1e-6)
    for found, expected in zip(ops.hyper_mix(x, weights), reference.hyper_mix(x, weights), strict=True):
        assert found is not None
        assert expected is not None
        assert error(found, expected) < 2.0**-8
    c, y = noise(3, 40, 4), noise(4, 40, 50)
    assert error(ops.hyper_add(x, c, y), reference.hyper_add(x, c, y)) < 1e-6
    rows, tail, taps = noise(5, 40, 30), noise(6, 9, 30), noise(7, 30, 4)
    found = ops.causal_conv(rows, tail, taps, 3)
    assert error(found[5:], reference.causal_conv(rows[5:], tail, taps, 3)) < 1e-6
    assert not found[:5].any()


@pytest.mark.parametrize("format", ["f32", "bf16", "q8_0"])
def test_products_round_what_the_record_says(format: str) -> None:
    matrix, x = random_matrix(40, 96, format), noise(1, 7, 96)
    operands = (x, dense_weight(matrix)) if format == "f32" else (x.bfloat16(), dense_weight(matrix).bfloat16())
    expected = operands[0].double() @ operands[1].double().T
    (found,) = ops_of(Frame(0, 7, 0, 7)).linears(x, [matrix])
    assert error(found, expected) < 1e-6


def test_frames_hold_a_chunks_rows_at_multiples_of_their_own() -> None:
    assert frames_of(0, 5, 4) == [Frame(0, 4, 0, 4), Frame(4, 4, 0, 1)]
    assert frames_of(6, 7, 4) == [Frame(4, 4, 2, 3)]
    for first, stop in ((0, 1), (3, 17), (8, 16), (15, 33)):
        held = [frame.start + row for frame in frames_of(first, stop, 8) for row in range(frame.first, frame.stop)]
        assert held == list(range(first, stop))
