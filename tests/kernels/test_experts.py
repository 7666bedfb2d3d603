"""The native expert kernels against the mirror, bit for bit: levels, formats, special blocks, sizes, rows, threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.experts import ExpertKernel, ExpertTasks, group_picks
from strata.quant import ExpertFormat, ExpertLayout, QuantisedMatrix, quantise
from tests.kernels import expert_mirror as mirror
from tests.kernels.guard import array_behind, behind

FORMATS: tuple[ExpertFormat, ...] = ("nvfp4", "q8_0", "bf16")
# 'vector' is every vector level of this processor but AVX-512, which has its own mark. Processors with AVX-512 have
# levels below it that others lack (AVX-VNNI), so the tests of that mark run those and the tests of all levels as well.
LEVELS = (
    "scalar",
    "vector",
    pytest.param("avx512", marks=pytest.mark.avx512),
    pytest.param("below avx512", marks=pytest.mark.avx512),
)
PROCESSORS = ("any", pytest.param("with avx512", marks=pytest.mark.avx512))

Expert = tuple[QuantisedMatrix, QuantisedMatrix, QuantisedMatrix]


def levels_of(name: str) -> list[str]:
    if name not in ("vector", "below avx512"):
        return [name]
    return [level for level in library.available_isa_levels() if level not in ("scalar", "avx512")]


class Packed:
    """Some experts of one layout, at their addresses, beside their matrices in row order."""

    def __init__(self, layout: ExpertLayout, gate: QuantisedMatrix, up: QuantisedMatrix, down: QuantisedMatrix):
        blobs, scales = layout.pack(gate, up, down)
        blobs[:, layout.payload_bytes :] = 0xFF  # the tail of the last page is never read
        self.layout, self.blobs, self.scales = layout, behind(blobs), scales.numpy()
        assert self.blobs.data_ptr() % 4096 == 0  # blobs are whole pages
        self.parts = (gate, up, down)
        self.kernel = ExpertKernel(layout)

    def expert(self, e: int) -> Expert:
        def one(m: QuantisedMatrix) -> QuantisedMatrix:
            return QuantisedMatrix(
                m.format, m.columns, m.codes[e], None if m.scales is None else m.scales[e], m.tensor_scale[e]
            )

        gate, up, down = self.parts
        return one(gate), one(up), one(down)

    @property
    def addresses(self) -> np.ndarray:
        stride, start = self.layout.blob_bytes, self.blobs.data_ptr()
        return np.array([start + e * stride for e in range(len(self.blobs))], np.uint64)

    def tasks(self, ids: np.ndarray) -> ExpertTasks:
        tasks = group_picks(ids.astype(np.int32))
        tasks.place(self.addresses, self.scales)
        return ExpertTasks(tasks.experts, *map(array_behind, (tasks.tasks, tasks.rows, tasks.slots)))

    def compute(self, x: torch.Tensor, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Results [T, K, H] as bits, and the flags."""
        out = behind(torch.full((*ids.shape, self.layout.hidden), torch.nan))
        flags = array_behind(np.zeros(len(x), np.uint8))
        self.kernel.compute(self.tasks(ids), behind(x.contiguous()), out, flags)
        return out.numpy().view(np.int32), flags

    def expected(self, x: torch.Tensor, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((*ids.shape, self.layout.hidden), np.float32)
        flags = np.zeros(len(x), bool)
        for e in np.unique(ids):
            rows, places = np.nonzero(ids == e)
            y, wrong = mirror.expert(*self.expert(int(e)), x.numpy()[rows])
            out[rows, places] = y
            np.logical_or.at(flags, rows, wrong)
        return out.view(np.int32), flags


def make(hidden: int, inner: int, format: ExpertFormat, experts: int = 1, seed: int = 0) -> Packed:
    random = torch.Generator().manual_seed(seed)
    shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
    gate, up, down = (quantise(torch.randn(shape, generator=random) * shape[-1] ** -0.5, format) for shape in shapes)
    return Packed(ExpertLayout(hidden, inner, format), gate, up, down)


def rows_of(count: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def only(count: int) -> np.ndarray:
    return np.zeros((count, 1), np.int32)


def agree(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> bool:
    return np.array_equal(found[0], expected[0]) and np.array_equal(found[1].astype(bool), expected[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_one_to_nine_give_the_mirror_bits(format: ExpertFormat, level: str) -> None:
    packed = make(192, 80, format)
    x = rows_of(9, 192)
    expected = packed.expected(x, only(9))
    for name in levels_of(level):
        library.select_isa(name)
        for count in range(1, 10):
            part = expected[0][:count], expected[1][:count]
            assert agree(packed.compute(x[:count], only(count)), part), (name, count)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(hidden=st.integers(1, 200), inner=st.integers(1, 140), format=st.sampled_from(FORMATS), seed=st.integers(0, 99))
def test_widths_off_the_tile(level: str, hidden: int, inner: int, format: ExpertFormat, seed: int) -> None:
    packed = make(hidden, inner, format, seed=seed)
    x = rows_of(3, hidden, seed)
    expected = packed.expected(x, only(3))
    for name in levels_of(level):
        library.select_isa(name)
        assert agree(packed.compute(x, only(3)), expected), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_prompt_gives_its_rows_the_bits_of_single_rows(format: ExpertFormat, level: str) -> None:
    """Many rows of an expert are computed from weights decoded once, up to 64 rows at a time."""
    packed = make(200, 72, format, experts=2)
    x = rows_of(75, 200)
    x[70, 3] = torch.nan
    ids = np.zeros((75, 1), np.int32)
    ids[70:, 0] = 1
    expected = packed.expected(x, ids)
    for name in levels_of(level):
        library.select_isa(name)
        assert agree(packed.compute(x, ids), expected), name


def special_rows(width: int) -> torch.Tensor:
    """Zeros, -0, all equal, one outlier, the largest and smallest that count, just below, subnormal, ties."""
    x = rows_of(12, width, 5)
    x[0] = 0.0
    x[1] = -0.0
    x[2] = 1.0
    x[3] = -0.7
    x[4, 7] = 1e6
    x[5] *= 2.0**-98
    x[6] *= 2.0**-103
    x[7] = 1e-42
    x[8] *= 2.0**60
    x[9, :16] = torch.arange(16) + 0.5
    x[9, 15] = 127.0
    x[10, ::2] = -0.0
    x[11, 16:32] = 0.0
    return x


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_special_rows_and_weights(format: ExpertFormat, level: str) -> None:
    hidden, inner = 128, 64
    random = torch.Generator().manual_seed(3)
    gate, up, down = (
        torch.randn(1, *shape, generator=random) * 0.1 for shape in ((inner, hidden),) * 2 + ((hidden, inner),)
    )
    gate[0, 0] = 0.0
    gate[0, 1] = -0.0
    gate[0, 2] = 0.25
    gate[0, 3, 40] = 100.0
    up[0, :, 16:32] = 0.0
    down[0, 5:9] = -0.0
    packed = Packed(ExpertLayout(hidden, inner, format), *(quantise(w, format) for w in (gate, up, down)))
    x = special_rows(hidden)
    expected = packed.expected(x, only(len(x)))
    for name in levels_of(level):
        library.select_isa(name)
        assert agree(packed.compute(x, only(len(x))), expected), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", ["nvfp4", "q8_0"])
def test_a_group_counts_from_two_to_the_minus_hundred_on(format: ExpertFormat, level: str) -> None:
    """Seen through large tensor scales: at the limit, one step below it, and with h around it instead of x."""
    plain = make(64, 64, format, seed=4)
    large = torch.full((1,), 2.0**100)
    gate, up, down = plain.parts
    inputs = Packed(plain.layout, replace(gate, tensor_scale=large), replace(up, tensor_scale=large), down)
    x = torch.zeros(3, 64)
    x[:, 5] = torch.tensor([2.0**-100, np.nextafter(np.float32(2.0**-100), np.float32(0)), 1.5 * 2.0**-100])
    inner = Packed(plain.layout, gate, up, replace(down, tensor_scale=large))
    small = rows_of(14, 64, 6) * (2.0 ** -torch.arange(42.0, 56.0))[:, None]
    for name in levels_of(level):
        library.select_isa(name)
        found = inputs.compute(x, only(3))
        assert agree(found, inputs.expected(x, only(3))), name
        assert [bool((row & 0x7FFFFFFF).any()) for row in found[0]] == [True, False, True], name
        assert agree(inner.compute(small, only(14)), inner.expected(small, only(14))), name


@pytest.mark.parametrize("level", LEVELS)
def test_q8_code_minus_128(level: str) -> None:
    packed = make(64, 32, "q8_0")
    gate, up, down = packed.parts
    for matrix in (gate, up, down):
        matrix.codes[0, ::3] = -128
        matrix.codes[0, 1::3, ::2] = 127
    packed = Packed(packed.layout, gate, up, down)
    x = torch.cat([rows_of(2, 64), torch.full((1, 64), -3.0), torch.full((1, 64), 3.0)])
    expected = packed.expected(x, only(4))
    for name in levels_of(level):
        library.select_isa(name)
        assert agree(packed.compute(x, only(4)), expected), name


@pytest.mark.parametrize("level", LEVELS)
def test_all_e4m3_scales_with_all_pairs_of_codes(level: str) -> None:
    packed = Packed(ExpertLayout(1024, 64, "nvfp4"), *mirror.every_scale_with_every_pair_of_codes())
    x = rows_of(2, 1024, 8)
    x[1] = 1.0
    expected = packed.expected(x, only(2))
    for name in levels_of(level):
        library.select_isa(name)
        assert agree(packed.compute(x, only(2)), expected), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_not_finite_are_flagged_and_touch_nobody(format: ExpertFormat, level: str) -> None:
    packed = make(100, 48, format, experts=2)
    x = rows_of(5, 100)
    ids = np.array([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]], np.int32)
    clean, _ = packed.compute(x, ids)
    x[1, 99] = float("nan")
    x[3, 0] = -float("inf")
    x[4] *= 1e38  # finite, but not its product
    for name in levels_of(level):
        library.select_isa(name)
        found, flags = packed.compute(x, ids)
        assert flags.tolist() == [0, 1, 0, 1, 1]
        assert np.isfinite(found.view(np.float32)).all()
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])
        assert agree((found, flags), packed.expected(x, ids))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_threads_levels_and_splits_change_no_bit(format: ExpertFormat, processor: str) -> None:
    assert processor == "any" or "avx512" in library.available_isa_levels()
    packed = make(320, 160, format, experts=6)
    x = rows_of(7, 320)
    ids = np.stack([np.random.default_rng(t).permutation(6)[:4] for t in range(7)]).astype(np.int32)
    library.select_isa("scalar")
    reference, _ = packed.compute(x, ids)
    for threads in (1, 2, 3, 4):
        pool.configure(threads)
        for level in library.available_isa_levels():
            library.select_isa(level)
            found, _ = packed.compute(x, ids)
            assert np.array_equal(found, reference), (threads, level)
            alone = np.concatenate([packed.compute(x[t : t + 1], ids[t : t + 1])[0] for t in range(7)])
            assert np.array_equal(alone, reference), (threads, level)
    for e in range(6):  # any part of the experts in any call gives the same places the same bits
        rows = np.nonzero((ids == e).any(1))[0]
        if len(rows):
            found, _ = packed.compute(x[rows], np.full((len(rows), 1), e, np.int32))
            assert np.array_equal(found[:, 0], reference[ids == e])


@pytest.mark.parametrize("format", FORMATS)
def test_poisoned_surroundings_change_nothing(format: ExpertFormat) -> None:
    packed = make(70, 25, format)
    x = rows_of(3, 70)
    expected, _ = packed.compute(x, only(3))
    large = make(320, 200, format)  # leaves NaN codes' scratch behind
    large.compute(torch.full((20, 320), torch.nan), only(20))
    around = torch.full((5, 70), torch.nan)
    around[1:4] = x
    out = torch.full((9, 70), 123.0)
    tasks = packed.tasks(only(3))
    tasks.rows[:] += 1
    tasks.slots[:] = [7, 2, 4]
    flags = packed.kernel.compute(tasks, around, out)
    assert flags[1:4].tolist() == [0, 0, 0]
    assert np.array_equal(out.numpy().view(np.int32)[[7, 2, 4]], expected[:, 0])
    assert (out[[0, 1, 3, 5, 6, 8]] == 123.0).all()


def test_the_callers_floating_point_mode_neither_enters_nor_leaves() -> None:
    packed = make(64, 32, "bf16")
    x = rows_of(2, 64) * 2e-19  # gate times up is subnormal
    expected = packed.compute(x, only(2))
    tiny = torch.full((4,), 1e-40)
    assert torch.set_flush_denormal(True)
    try:
        found = packed.compute(x, only(2))
        assert (tiny * 0.5 == 0).all()
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found[0], expected[0])
    assert (expected[0] != 0).any()


@pytest.mark.parametrize("picks", [1, 3, 8, 10])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_combine_sums_in_router_order_by_fused_multiply_add(picks: int, processor: str) -> None:
    assert processor == "any" or "avx512" in library.available_isa_levels()
    kernel = ExpertKernel(ExpertLayout(200, 64, "nvfp4"))
    parts, weights = rows_of(5 * picks, 200).view(5, picks, 200), rows_of(5, picks, 9)
    expected = mirror.combine(parts.numpy(), weights.numpy()).view(np.int32)
    for level in library.available_isa_levels():
        library.select_isa(level)
        assert np.array_equal(kernel.combine(parts, weights).numpy().view(np.int32), expected), level
    weights[2, 0] = torch.nan
    flags = np.zeros(5, np.uint8)
    y = kernel.combine(parts, weights, flags)
    assert flags.tolist() == [0, 0, 1, 0, 0]
    assert (y[2] == 0).all()


def test_silu_is_close_to_the_mathematics() -> None:
    x = np.linspace(-100, 100, 40001).astype(np.float32)
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    inside = np.abs(x) < 87
    assert np.max(np.abs(mirror.silu(x) - exact)[inside] / np.maximum(np.abs(exact[inside]), 1e-37)) < 4e-7


def test_activations_cost_one_percent() -> None:
    """Relative error of an expert's output from quantised activations alone (decision record 0010)."""
    packed = make(1024, 512, "q8_0")
    gate, up, down = packed.layout.dequantise(packed.blobs, torch.from_numpy(packed.scales))
    heavy = torch.from_numpy(np.random.default_rng(0).standard_t(3, (16, 1024)).astype(np.float32))
    for x, most in ((rows_of(16, 1024), 0.0105), (heavy, 0.0135)):
        found, _ = packed.compute(x, only(16))
        exact = x.double()
        inside = torch.nn.functional.silu(exact @ gate[0].double().T) * (exact @ up[0].double().T)
        wanted = inside @ down[0].double().T
        error = torch.from_numpy(found[:, 0].view(np.float32)).double() - wanted
        assert 0.005 < (error.norm() / wanted.norm()).item() < most


def test_group_picks_keeps_rows_rising_and_leaves_out_what_is_not_wanted() -> None:
    ids = np.array([[5, 2], [2, 7], [7, 5]], np.int32)
    tasks = group_picks(ids)
    assert tasks.experts.tolist() == [2, 5, 7]
    assert tasks.tasks["first"].tolist() == [0, 2, 4]
    assert tasks.tasks["count"].tolist() == [2, 2, 2]
    assert tasks.rows.tolist() == [0, 1, 0, 2, 1, 2]
    assert tasks.slots.tolist() == [1, 2, 0, 5, 3, 4]
    wanted = np.zeros(8, bool)
    assert len(group_picks(ids, wanted).tasks) == 0
    wanted[7] = True
    assert group_picks(ids, wanted).slots.tolist() == [3, 4]


def test_no_picks_are_no_work() -> None:
    packed = make(64, 32, "nvfp4")
    tasks = group_picks(only(2), np.zeros(1, bool))
    assert packed.kernel.compute(tasks, rows_of(2, 64), torch.zeros(2, 64)).tolist() == [0, 0]


def faulty(packed: Packed, name: str) -> ExpertTasks:
    tasks = packed.tasks(only(2))
    if name == "null":
        tasks.tasks["blob"] = 0
    elif name == "misaligned":
        tasks.tasks["blob"] += np.uint64(4)
    elif name == "row":
        tasks.rows[1] = 2
    elif name == "slot":
        tasks.slots[0] = -1
    elif name == "picks":
        tasks.tasks["count"] = 3
    elif name == "scale":
        tasks.tasks["scales"][0, 1] = np.nan
    return tasks


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("null", "no address"),
        ("misaligned", "not aligned to 64"),
        ("row", "row 2 of 2"),
        ("slot", "result -1 of 2"),
        ("picks", "picks 0 to 3 of 2"),
        ("scale", "tensor scale"),
    ],
)
def test_a_faulty_task_is_an_error_of_its_call_alone(name: str, words: str) -> None:
    packed = make(64, 32, "nvfp4")
    x, out = rows_of(2, 64), torch.zeros(2, 64)
    with pytest.raises(EngineError, match=words):
        packed.kernel.compute(faulty(packed, name), x, out)
    assert (out == 0).all()
    packed.kernel.compute(packed.tasks(only(2)), x, out)
    assert (out != 0).any()


def test_tensors_of_another_kind_are_refused() -> None:
    packed = make(64, 32, "nvfp4")
    tasks = packed.tasks(only(2))
    with pytest.raises(EngineError, match="x must be"):
        packed.kernel.compute(tasks, rows_of(2, 64).double(), torch.zeros(2, 64))
    with pytest.raises(EngineError, match="rows of 65"):
        packed.kernel.compute(tasks, rows_of(2, 65), torch.zeros(2, 64))
    with pytest.raises(EngineError, match="out must be"):
        packed.kernel.compute(tasks, rows_of(2, 64), torch.zeros(2, 128)[:, ::2])
