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
from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights
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
    return PromptOps(frame, PlainCalls(), DenseWeights(launcher()), launcher())


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


def delta_rows(count: int, key_width: int, value_width: int) -> tuple[torch.Tensor, DeltaRows, torch.Tensor]:
    """Values that BF16 holds, so that only the arithmetic rounds, and a state. Keys repeat, some betas are near one."""
    q = functional.normalize(noise(1, count, 2, key_width), dim=-1).bfloat16().float()
    k = functional.normalize(noise(2, count, 2, key_width), dim=-1).bfloat16().float()
    k[3::7] = k[2::7][: len(k[3::7])]
    beta, decay = (noise(4, count, 4) * 3).sigmoid(), -noise(5, count, 4).abs() * 0.3
    decay[::9] = -20.0
    rows = DeltaRows(k, noise(3, count, 4, value_width).bfloat16().float(), beta, decay)
    return q, rows, noise(6, 4, key_width, value_width)


@pytest.mark.parametrize(
    ("widths", "rows"),
    [((16, 24), (5, 38)), ((40, 16), (0, 96)), ((128, 128), (7, 84)), ((64, 128), (33, 34)), ((8, 8), (31, 65))],
)
def test_the_delta_rule_is_the_recurrence_over_the_rows_that_are_new(
    widths: tuple[int, int], rows: tuple[int, int]
) -> None:
    (first, stop), count = rows, 96
    q, delta, state = delta_rows(count, *widths)
    parts = (q, delta.k_TGD, delta.v_TNV, delta.beta_TN, delta.g_TN)
    expected, after = recurrent_delta(*(part[None, first:stop].double() for part in parts), state[None].double())
    assert expected is not None
    poisoned = [part.clone() for part in parts]
    for part in poisoned:
        part[:first] = part[stop:] = torch.nan
    whole, cut = state.clone(), state.clone()
    frame = Frame(0, count, first, stop)
    found = ops_of(frame).gated_delta(poisoned[0], DeltaRows(*poisoned[1:]), whole, None, write=True)
    assert error(found[first:stop], expected[0]) < 2.0**-8
    assert error(whole, after[0]) < 2.0**-8
    middle = (first + stop) // 2 // 32 * 32  # in two parts, where a block ends: the same bits
    if not first < middle < stop:
        return
    one = ops_of(Frame(0, count, first, middle)).gated_delta(q, delta, cut, None, write=True)
    two = ops_of(Frame(0, count, middle, stop)).gated_delta(q, delta, cut, None, write=True)
    assert torch.equal(torch.cat((one[first:middle], two[middle:stop])), found[first:stop])
    assert torch.equal(cut, whole)


def test_equal_keys_and_betas_of_one_need_no_cancellation() -> None:
    """Powers of the block's matrix would grow beyond what FP32 holds; each change is the difference of two values."""
    q, delta, state = delta_rows(64, 16, 16)
    delta.k_TGD[:] = delta.k_TGD[0]
    delta.beta_TN.fill_(1.0)
    delta.g_TN.fill_(0.0)
    parts = (q, delta.k_TGD, delta.v_TNV, delta.beta_TN, delta.g_TN)
    expected, after = recurrent_delta(*(part[None].double() for part in parts), state[None].double())
    assert expected is not None
    found = ops_of(Frame(0, 64, 0, 64)).gated_delta(q, delta, state, None, write=True)
    assert error(found, expected[0]) < 2.0**-7
    assert error(state, after[0]) < 2.0**-7


@pytest.mark.parametrize(("taps", "widths"), [(4, (16, 40)), (3, (128, 96))])
def test_inputs_of_the_delta_rule_are_the_references(taps: int, widths: tuple[int, int]) -> None:
    (key, value), groups, heads, (first, stop), rows = widths, 2, 6, (3, 38), 40
    channels = 2 * groups * key + heads * value
    weights = DeltaWeights(noise(1, channels, taps), noise(2, heads), noise(3, heads) * 15, groups, heads, key, value)
    qkv, tail, b, a = (
        noise(4, rows, channels),
        noise(5, taps - 1, channels),
        noise(6, rows, heads),
        noise(7, rows, heads),
    )
    new = slice(first, stop)
    expected_q, expected = ReferenceOps().delta_inputs(qkv[new], tail, b[new], a[new], weights)
    for x in (qkv, b, a):
        x[:first] = x[stop:] = torch.nan
    q, found = ops_of(Frame(0, rows, first, stop)).delta_inputs(qkv, tail, b, a, weights)
    for ours, theirs in ((q, expected_q), (found.k_TGD, expected.k_TGD), (found.v_TNV, expected.v_TNV)):
        assert ours.dtype == torch.bfloat16
        assert float((ours[new].double() - theirs).abs().max() / theirs.abs().max()) < 2.0**-8
    assert error(found.beta_TN[new], expected.beta_TN) < 1e-6
    assert error(found.g_TN[new], expected.g_TN) < 1e-6


@pytest.mark.parametrize("kind", ["sigmoid", "silu"])
def test_gates_and_norms_are_the_references(kind: Any) -> None:
    ops, reference, rows = ops_of(Frame(0, 9, 0, 9)), ReferenceOps(), 9
    o, z, weight = noise(1, rows, 3, 72), noise(2, rows, 3, 72), noise(3, 72)
    found = ops.gated_norm(o, z, weight, 1e-6, kind)
    assert error(found.float(), reference.gated_norm(o, z, weight, 1e-6, kind)) < 2.0**-8
    matrix, both = random_matrix(24, 216, "q8_0"), noise(4, rows, 3, 2, 72)
    for gate, x in ((both[:, :, 1], o), (z.flatten(1), o.flatten(1))):
        assert error(ops.gated_linear(gate, x, matrix, kind), reference.gated_linear(gate, x, matrix, kind)) < 2.0**-7
    y, one = noise(5, rows, 300), noise(6, rows, 1)
    assert error(ops.add_gated(y, one, y.flip(0)), reference.add_gated(y, one, y.flip(0))) < 1e-6


@pytest.mark.parametrize(("width", "half", "plus_one"), [(256, 32, True), (128, 64, False), (40, 6, True)])
def test_head_norms_with_rotary_values_are_the_references(width: int, half: int, plus_one: bool) -> None:
    rows = 7
    ops, reference, both = ops_of(Frame(0, rows, 0, rows)), ReferenceOps(), noise(1, rows, 5, 2, width)
    angle = noise(2, rows, half)
    heads = [(both[:, :, 0], noise(3, width)), (noise(4, rows, 2, width), noise(5, width))]
    arguments = (heads, 1e-6, angle.cos(), angle.sin())
    found = ops.norm_rope(*arguments, plus_one=plus_one)
    for ours, theirs in zip(found, reference.norm_rope(*arguments, plus_one=plus_one), strict=True):
        assert error(ours, theirs) < 1e-6


@pytest.mark.parametrize(("experts", "top_k"), [(512, 10), (40, 40), (7, 2), (1024, 8)])
def test_the_router_picks_what_the_reference_picks(experts: int, top_k: int) -> None:
    logits, rows = noise(1, 20, experts), slice(2, 19)
    logits[3, :] = 1.0  # ties go to the lower id
    logits[4, 2:5] = torch.inf * -1
    logits[5] = logits[5].round()
    logits[6, 1::2] = torch.nan
    expected, weights = ReferenceOps().router(logits[rows], top_k, renormalise=True)
    ids, found = ops_of(Frame(0, 20, 2, 19)).router(logits, top_k, renormalise=True)
    assert torch.equal(ids[rows], expected)
    assert torch.allclose(found[rows], weights, rtol=1e-5, atol=1e-8, equal_nan=True)
    assert (ids[:2] == -1).all()
    assert (ids[19:] == -1).all()


@pytest.mark.parametrize("columns", [96, 100, 33])
def test_eight_bit_weights_are_rounded_to_bf16_once(columns: int) -> None:
    matrix = random_matrix(70, columns, "q8_0")
    assert torch.equal(DenseWeights(launcher()).get(matrix), dense_weight(matrix).bfloat16())


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


@pytest.mark.parametrize(("hidden", "format"), [(50, "f32"), (64, "bf16"), (96, "q8_0")])
def test_streams_are_the_references(hidden: int, format: str) -> None:
    ops, reference = ops_of(Frame(0, 40, 5, 38)), ReferenceOps()
    x, wide = noise(1, 40, 4, hidden), 4 * hidden
    matrices = (random_matrix(12, wide, format), random_matrix(wide, 12, format), random_matrix(4, wide, format))
    weights = HyperWeights(noise(2, 4, hidden), *matrices, 1e-6)
    c, y = noise(3, 40, 4), noise(4, 40, hidden)
    added, expected_sum = ops.hyper_add(x, c, y), reference.hyper_add(x, c, y)
    fused, expected = ops.hyper_mix(added, weights), reference.hyper_mix(expected_sum, weights)
    assert error(added, expected_sum) < 1e-6
    again = ops.hyper_mix(added, weights)  # of a sum that is there: the same bits
    for found, same, exact in zip(fused, again, expected, strict=True):
        assert found is not None
        assert same is not None
        assert exact is not None
        assert error(found, exact) < 2.0**-8
        assert torch.equal(found, same)
    for read in (
        lambda s: ops.add(s, x),
        lambda s: ops.hyper_mix(s[7:8], weights)[0],
        lambda s: ops.hyper_add(s, c, y),
    ):
        owed = ops.hyper_add(x, c, y)
        read(owed)
        assert torch.equal(owed, added), "whoever reads the streams finds their sum"
    without = HyperWeights(weights.norm_SH, *matrices[:2], None, 1e-6)
    assert torch.equal(ops.hyper_mix(added, without)[0], fused[0])


def test_convolutions_are_the_references() -> None:
    ops, reference = ops_of(Frame(0, 40, 5, 38)), ReferenceOps()
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
    assert error(found, expected) < (2.0**-16 if format == "f32" else 1e-6)


@pytest.mark.parametrize(("rows", "outputs", "columns"), [(70, 48, 100), (65, 130, 64), (3, 8, 36)])
def test_products_of_fp32_matrices_are_nearly_as_exact(rows: int, outputs: int, columns: int) -> None:
    x = noise(1, rows, columns)
    matrices = [random_matrix(outputs, columns, "f32") for _ in range(3)] + [random_matrix(outputs, columns, "bf16")]
    found = ops_of(Frame(0, rows, 0, rows)).linears(x, matrices)
    for y, matrix in zip(found[:3], matrices, strict=False):
        size = x.double().abs() @ matrix.data.double().abs().T
        assert float(((y - x.double() @ matrix.data.double().T).abs() / size).max()) < 2.0**-16
    alone = ops_of(Frame(0, rows, 0, rows)).linear(x[-1:], matrices[1])
    assert torch.equal(alone[0], found[1][-1]), "a row's bits do not depend on its place"


def test_scores_of_index_blocks_are_nearly_as_exact_as_fp32() -> None:
    """Of all blocks that a row of the chunk may see, whose number is no multiple of a tile; NaN stays NaN."""
    rows, heads, width, start, block = 80, 4, 36, 240, 2
    frame = Frame(start, rows, 5, 70)
    q, keys = noise(1, rows, heads, width), noise(2, (start + rows) // block, width)
    keys[7, 3] = torch.nan
    q[:5] = torch.nan
    (scores,) = ops_of(frame)._split(q.flatten(1), [keys], heads, block)
    exact = torch.stack([(q[:, head].double() @ keys.double().T).relu() for head in range(heads)]).sum(0)
    size = torch.stack([q[:, head].double().abs() @ keys.double().abs().T for head in range(heads)]).sum(0)
    for row in range(5, 70):
        seen = (start + row + 1) // block
        assert scores[row, 7].isnan()
        kept = [number for number in range(seen) if number != 7]
        assert float(((scores - exact).abs() / size)[row, kept].max()) < 2.0**-16


def test_frames_hold_a_chunks_rows_at_multiples_of_their_own() -> None:
    assert frames_of(0, 5, 4) == [Frame(0, 4, 0, 4), Frame(4, 4, 0, 1)]
    assert frames_of(6, 7, 4) == [Frame(4, 4, 2, 3)]
    for first, stop in ((0, 1), (3, 17), (8, 16), (15, 33)):
        held = [frame.start + row for frame in frames_of(first, stop, 8) for row in range(frame.first, frame.stop)]
        assert held == list(range(first, stop))
