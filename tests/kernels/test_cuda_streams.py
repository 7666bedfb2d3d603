"""Recorded hyper-connections and the n-gram gate against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.ops import HyperWeights, Matrix, NgramWeights
from strata.kernels.reference import ReferenceOps
from tests.kernels.cuda_runs import FORMATS, Run, coded, equal, noise, random_matrix, run, same_rows

REFERENCE = ReferenceOps()


def mixer(streams: int, columns: int, rank: int, formats: tuple[str, str], *, inject: bool) -> HyperWeights:
    wide = streams * columns
    return HyperWeights(
        noise(streams, columns),
        random_matrix(rank, wide, formats[0]),
        random_matrix(wide, rank, formats[1]),
        random_matrix(streams, wide, formats[0], 2) if inject else None,
        1e-6,
    )


def dense(matrix: Matrix) -> torch.Tensor:
    """The weights as FP64."""
    data = matrix.data.double()
    if matrix.scales is not None:
        data = data * matrix.scales.double().repeat_interleave(32, dim=1)
    return data[:, : matrix.columns]


def coded_mix(x_TSH: torch.Tensor, weights: HyperWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The mix in FP64 by its definition, but that q8_0 products read 16-bit codes of their rows: of a stream times
    1 + norm, whose root mean square is one factor of its sums, and of the low rank."""
    rows, streams, columns = x_TSH.shape
    factor = 1.0 + weights.norm_SH.double()
    inverse = (x_TSH.double().pow(2).mean(-1, keepdim=True) + weights.eps).rsqrt()
    read = (x_TSH.double() * factor).float()

    def sums(matrix: Matrix) -> torch.Tensor:
        staged = coded(read) if matrix.format == "q8_0" else read
        shares = torch.einsum("tsh,fsh->tsf", staged.double(), dense(matrix).view(-1, streams, columns))
        return (shares * inverse).mean(1)

    low = torch.nn.functional.silu(sums(weights.down)).float()
    low = coded(low) if weights.up.format == "q8_0" else low
    gates = (low.double() @ dense(weights.up).T).view(rows, streams, columns).sigmoid()
    u = (gates * x_TSH.double() * inverse * factor).mean(1)
    return u.float(), None if weights.inject is None else (2.0 * sums(weights.inject).sigmoid()).float()


@settings(max_examples=20)
@given(
    rows=st.integers(1, 8), streams=st.integers(2, 5), columns=st.sampled_from([16, 48, 160, 608]),
    rank=st.sampled_from([1, 8, 40, 330]), formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    inject=st.booleans(),
)  # fmt: skip
def test_mix(rows: int, streams: int, columns: int, rank: int, formats: tuple[str, str], inject: bool) -> None:
    if formats[0] == "q8_0" and streams * columns % 32:
        columns *= 2
    x, weights = noise(rows, streams, columns), mixer(streams, columns, rank, formats, inject=inject)
    u, c = run(lambda ops: ops.hyper_mix(x, weights))
    expected_u, expected_c = coded_mix(x, weights) if "q8_0" in formats else REFERENCE.hyper_mix(x, weights)
    rtol, atol = 2e-5, 1e-5 if "q8_0" in formats else 3e-6  # a code on its border may go either way
    torch.testing.assert_close(u, expected_u, rtol=rtol, atol=atol)
    assert (c is None) == (expected_c is None)
    if c is not None and expected_c is not None:
        torch.testing.assert_close(c, expected_c, rtol=rtol, atol=atol)


@pytest.mark.parametrize("columns", [33, 160])
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_odd_widths_and_rows(columns: int, format: str) -> None:
    x, weights = noise(8, 4, columns), mixer(4, columns, 21, (format, format), inject=True)
    u, _ = run(lambda ops: ops.hyper_mix(x, weights))
    torch.testing.assert_close(u, REFERENCE.hyper_mix(x, weights)[0], rtol=2e-5, atol=3e-6)
    same_rows(lambda ops, r: ops.hyper_mix(x[r], weights), 8)
    same_rows(lambda ops, r: ops.hyper_mix(x[r], weights), 3)


@pytest.mark.parametrize(("columns", "rank"), [(512, 32), (2560, 320), (1024, 512)])
@pytest.mark.parametrize("format", ["q8_0", "bf16"])
@pytest.mark.parametrize("inject", [False, True])
def test_the_shape_that_kernels_are_made_for(columns: int, rank: int, format: str, inject: bool) -> None:
    """Near the reference, and row by row the same bits."""
    x, weights = noise(8, 4, columns), mixer(4, columns, rank, (format, format), inject=inject)
    added = noise(8, 4), noise(8, columns), noise(8, 1), noise(8, columns, seed=1)

    def record(ops: CudaOps, r: slice = slice(0, 8)) -> list[torch.Tensor]:
        c, y, gate, more = (part[r] for part in added)
        streams = ops.hyper_add(x[r], c, ops.add_gated(y, gate, more))
        u, strength = ops.hyper_mix(streams, weights)
        return [streams, u] if strength is None else [streams, u, strength]

    found = run(record)
    c, y, gate, more = added
    streams = REFERENCE.hyper_add(x, c, REFERENCE.add_gated(y, gate, more))
    for one, expected in zip(found, [streams, *coded_mix(streams, weights)], strict=False):
        torch.testing.assert_close(one, expected, rtol=2e-5, atol=1e-5)
    same_rows(record, 8)
    same_rows(record, 3)


def test_rows_that_do_not_fit_shared_memory_together() -> None:
    x, weights = noise(8, 4, 608), mixer(4, 608, 30, ("q8_0", "q8_0"), inject=True)
    whole = run(lambda ops: ops.hyper_mix(x, weights), shared_bytes=100 << 10)
    parts = run(lambda ops: ops.hyper_mix(x, weights), shared_bytes=10 << 10)
    assert all(equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_q8_streams_of_odd_width_are_refused() -> None:
    with pytest.raises(EngineError, match="not read in 4 parts"):
        run(lambda ops: ops.hyper_mix(noise(1, 4, 40), mixer(4, 40, 8, ("q8_0", "f32"), inject=False)))


def test_add() -> None:
    x, c, y = noise(5, 4, 70), noise(5, 4), noise(5, 70)
    found = run(lambda ops: ops.hyper_add(x, c, y))
    torch.testing.assert_close(found, REFERENCE.hyper_add(x, c, y), rtol=1e-6, atol=1e-6)
    same_rows(lambda ops, r: ops.hyper_add(x[r], c[r], y[r]), 5)


@pytest.mark.parametrize("shared_bytes", [48 << 10, 1])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_are_done_in_the_mix_that_reads_them(gated: bool, shared_bytes: int) -> None:
    """Two launches with the bits of three or four."""
    x, c, y, gate, more = noise(5, 4, 64), noise(5, 4), noise(5, 64), noise(5, 1), noise(5, 64, seed=1)
    weights = mixer(4, 64, 20, ("q8_0", "bf16"), inject=True)

    def record(ops: CudaOps, r: slice = slice(0, 5), *, apart: bool = False) -> tuple[torch.Tensor, ...]:
        read = ops.add_gated(y[r], gate[r], more[r]) if gated else y[r]
        if apart:
            ops.settle()
        streams = ops.hyper_add(x[r], c[r], read)
        if apart:
            ops.settle()
        u, strength = ops.hyper_mix(streams, weights)
        assert strength is not None
        return u, strength, streams

    together = run(record, shared_bytes=shared_bytes)
    apart = run(lambda ops: record(ops, apart=True), shared_bytes=shared_bytes)
    assert all(equal(a, b) for a, b in zip(together, apart, strict=True))
    same_rows(record, 5, shared_bytes=shared_bytes)
    one = Run.new()
    record(one.ops)
    assert len(one.program.launches) == 2
    used = run(lambda ops: ops.start_streams(ops.hyper_add(x, c, ops.add_gated(y, gate, more)).flatten(1), 1))
    expected = REFERENCE.hyper_add(x, c, REFERENCE.add_gated(y, gate, more))
    torch.testing.assert_close(used.view(x.shape), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 31, 300])
def test_ngram_gate(columns: int) -> None:
    key, x, value = noise(5, 4, columns), noise(5, 4, columns, seed=1), noise(5, columns)
    key[0, 0] = 0.0  # a match of exactly zero
    weights = NgramWeights(*(noise(4, columns, seed=i) for i in range(3)), 1e-6)
    found = run(lambda ops: ops.ngram_gate(key, value, x, weights))
    for one, expected in zip(found, REFERENCE.ngram_gate(key, value, x, weights), strict=True):
        torch.testing.assert_close(one, expected, rtol=2e-5, atol=3e-6)
    same_rows(lambda ops, r: ops.ngram_gate(key[r], value[r], x[r], weights), 5)
