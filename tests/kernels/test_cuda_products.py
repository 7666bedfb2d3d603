"""Recorded products and the embedding against the reference: formats, odd sizes, groups, pieces, row invariance."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.ops import Matrix
from tests.kernels import rows_mirror
from tests.kernels.cuda_runs import FORMATS, CodedReference, Run, coded, equal, noise, random_matrix, run, same_rows

REFERENCE = CodedReference()


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 3e-6) -> None:
    worst = float((found - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    assert worst < bound, worst


@settings(max_examples=25)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 1300),
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    formats=st.lists(st.sampled_from(FORMATS), min_size=5, max_size=5),
)
@example(rows=3, columns=1024, outputs=[1, 64, 7], formats=["q8_0", "bf16", "f32", "f32", "f32"])
@example(rows=8, columns=33, outputs=[5], formats=["bf16"] * 5)
def test_products_of_a_group(rows: int, columns: int, outputs: list[int], formats: list[str]) -> None:
    weights = [random_matrix(size, columns, formats[i], i) for i, size in enumerate(outputs)]
    x = noise(rows, columns)
    for y, weight in zip(run(lambda ops: ops.linears(x, weights)), weights, strict=True):
        close(y, REFERENCE.linear(x, weight))


@pytest.mark.parametrize("columns", [640, 70])
def test_rows_do_not_depend_on_each_other(columns: int) -> None:
    weights = [random_matrix(9, columns, format) for format in FORMATS]
    x = noise(8, columns)
    x[3] = torch.nan
    same_rows(lambda ops, rows: ops.linears(x[rows], weights), 8)
    same_rows(lambda ops, rows: ops.linears(x[rows], weights), 3)


def test_pieces_of_activations_change_no_bit() -> None:
    """Columns that do not fit shared memory are staged piece by piece."""
    weights, x = [random_matrix(70, 2100, format) for format in FORMATS], noise(8, 2100)
    whole = run(lambda ops: ops.linears(x, weights), shared_bytes=200 << 10)
    for size in (16 << 10, 1):
        pieces = run(lambda ops: ops.linears(x, weights), shared_bytes=size)
        assert all(equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_a_matrix_alone_or_in_a_group_or_moved() -> None:
    weights = [random_matrix(11, 300, format) for format in FORMATS]
    x = noise(2, 300)
    group = run(lambda ops: ops.linears(x, weights))
    for y, weight in zip(group, weights, strict=True):
        assert equal(y, run(lambda ops, weight=weight: ops.linear(x, weight)))
    odd = torch.empty(11 * 300 + 1)[1:].view(11, 300).copy_(weights[0].data)  # 4 bytes off
    assert equal(group[0], run(lambda ops: ops.linear(x, Matrix("f32", odd, 300))))


def test_more_matrices_than_a_launch_holds_and_more_rows_than_a_window() -> None:
    weights, x = [random_matrix(3, 40, "f32", seed) for seed in range(19)], noise(6, 4, 40)
    for y, weight in zip(run(lambda ops: ops.linears(x, weights)), weights, strict=True):
        close(y, REFERENCE.linear(x, weight))


def test_rows_are_coded_as_on_the_cpu() -> None:
    """Through a matrix that picks columns: what comes out are the codes, borders, zeros and tiny values included."""
    columns = 96
    x = noise(8, columns)
    x[1] *= torch.logspace(-38, 28, columns)
    x[2], x[3, :32], x[4, 5] = 0.0, 2.0**-130, 2.0**95 * 1.9999999
    x[5] = torch.linspace(1, 2, columns).nextafter(torch.tensor(2.0)) - 2.0**-24
    x[6, 40], x[7, 70] = 2.0**96, torch.inf
    pick = Matrix("q8_0", torch.eye(columns, dtype=torch.int8), columns, torch.ones(columns, 3).half())
    found = run(lambda ops: ops.linear(x, pick))
    expected = coded(x)
    for row in range(6):
        assert torch.equal(found[row], expected[row]), row  # a zero has no sign in a code
        assert torch.equal(torch.from_numpy(rows_mirror.coded(x[row : row + 1].numpy()))[0], expected[row]), row
    assert found[6:].isnan().all()


def test_extreme_q8_weights_are_exact() -> None:
    data = torch.tensor([[-128, 127, 0, 1, -1, -127, 64, 3] * 8], dtype=torch.int8)
    scales = torch.tensor([[2.0**-24, 65504.0]]).half()  # the smallest and the largest FP16
    x = torch.zeros(8, 64)
    x[torch.arange(8), torch.tensor([0, 1, 5, 31, 32, 33, 37, 63])] = 1.0
    y = run(lambda ops: ops.linear(x, Matrix("q8_0", data, 64, scales)))
    expected = x.double() @ (data.double().view(1, 2, 32) * scales.double()[..., None]).view(1, 64).T
    assert torch.equal(y.double(), expected)


def test_gated_products() -> None:
    gate, x, weight = noise(5, 130), noise(5, 130, seed=9), random_matrix(20, 130, "bf16")
    for kind in ("sigmoid", "silu"):
        close(run(lambda ops, kind=kind: ops.gated_linear(gate, x, weight, kind)),
              REFERENCE.gated_linear(gate, x, weight, kind))  # fmt: skip
        same_rows(lambda ops, r, kind=kind: ops.gated_linear(gate[r], x[r], weight, kind), 5)
    wide = noise(5, 3, 2, 40)  # a gate whose heads lie apart
    matrix, heads = random_matrix(9, 120, "f32"), noise(5, 3, 40, seed=2)
    apart = run(lambda ops: ops.gated_linear(wide[:, :, 1], heads, matrix, "sigmoid"))
    assert equal(apart, run(lambda ops: ops.gated_linear(wide[:, :, 1].contiguous(), heads, matrix, "sigmoid")))
    close(apart, REFERENCE.gated_linear(wide[:, :, 1], heads, matrix, "sigmoid"))
    up, down = random_matrix(130, 64, "q8_0", 3), random_matrix(64, 130, "q8_0", 4)
    h = noise(2, 64)
    close(run(lambda ops: ops.swiglu(h, up, up, down)), REFERENCE.swiglu(h, up, up, down))


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_reads_ids_from_the_inputs(format: str) -> None:
    table = random_matrix(50, 70, format)
    one = Run.new()
    y = one.ops.embedding([0] * 4, table)
    launches = one.prepare()
    for ids in ([3, 49, 0, 3], [1, 2, 3, 4]):
        one.set(ids)
        launches.run()
        one.machine.synchronize()
        assert torch.equal(y, REFERENCE.embedding(ids, table))
    one.set([-1, 50, 2**31 - 1, -(2**31)])  # of a round that was stopped: in range, whatever they say
    launches.run()
    one.machine.synchronize()
    assert torch.equal(y, REFERENCE.embedding([0, 49, 49, 0], table))


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
@pytest.mark.parametrize("width", [20, 128])
def test_a_gated_norm_is_done_in_the_product_that_reads_it(width: int, gate: Literal["sigmoid", "silu"]) -> None:
    """One launch with the bits of two, whole and in pieces; read by anything else it is a launch of its own."""
    o, z, weight, matrix = (
        noise(8, 13, width),
        noise(8, 13, width, seed=1),
        noise(width),
        random_matrix(7, 13 * width, "f32"),
    )

    def record(ops: CudaOps, r: slice = slice(0, 8)) -> torch.Tensor:
        return ops.linear(ops.gated_norm(o[r], z[r], weight, 1e-6, gate).flatten(1), matrix)

    def apart(ops: CudaOps) -> torch.Tensor:
        normed = ops.gated_norm(o, z, weight, 1e-6, gate)
        ops.settle()
        return ops.linear(normed.flatten(1), matrix)

    together = run(record)
    assert equal(together, run(apart))
    assert equal(together, run(record, shared_bytes=1))
    same_rows(record, 8)
    counts = []
    for way in (record, apart):
        one = Run.new()
        way(one.ops)
        counts.append(len(one.program.launches))
    assert counts == [1 if width == 128 else 2, 2]  # heads of other widths are rare and get a launch of their own


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(EngineError, match="linear columns: 31 and 32"):
        run(lambda ops: ops.linear(noise(1, 31), random_matrix(4, 32, "f32")))
    with pytest.raises(EngineError, match="a recorded round of 9 rows"):
        run(lambda ops: ops.embedding([0] * 9, random_matrix(4, 32, "f32")))
