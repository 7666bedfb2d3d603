"""Every kernel of the card, by emulation, over all of its row counts at widths of real models and at odd ones.

The emulation hands out memory full of NaN between guards, so that what is left unwritten or read past an end is seen.
Expectations are FP64 or exact. The last test lists the kernels that there are: a new one has to join the sweep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.kernels.cuda.cache_rows import KeyValueRows
from strata.kernels.cuda.compile import list_kernels
from strata.kernels.cuda.copies import record_copy_in
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import Address, Launch
from strata.kernels.cuda.rotary import RecordedRotary
from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights, Matrix, NgramWeights
from strata.kernels.reference import ReferenceOps
from strata.quant import ExpertLayout
from tests.emulator.compile import load
from tests.emulator.machine import EmulatedMachine, EmulatedProgram
from tests.kernels import test_cuda_delta_step as steps
from tests.kernels import test_cuda_experts as experts
from tests.kernels import test_cuda_round as rounds
from tests.kernels.cuda_runs import FORMATS, Run, coded, noise, random_matrix
from tests.source_tree import PACKAGE

ROWS = range(1, 9)
WIDTHS = (511, 513, 640, 2048, 2560, 5120)
BOUND = 4e-6  # of FP32 sums of up to 5,120 terms in 32 lanes or more, relative to the largest result

launched: set[str] = set()
SWEPT: dict[str, frozenset[str]] = {}

# What a row count or a width does not reach, and who holds it.
ELSEWHERE = {
    "nothing.nothing": "an empty launch",
    "round.probe": "test_cuda_round.py: the mailbox's self-test",
}


@pytest.fixture(autouse=True)
def _see_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    prepare = EmulatedMachine.prepare

    def seen(self: EmulatedMachine, launches: list[Launch]) -> Any:
        launched.update(launch.kernel for launch in launches)
        return prepare(self, launches)

    monkeypatch.setattr(EmulatedMachine, "prepare", seen)
    launched.clear()
    yield
    launched.clear()


def sweeps(*kernels: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test launches exactly these kernels."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        SWEPT[test.__name__] = SWEPT.get(test.__name__, frozenset()) | set(kernels)

        @wraps(test)
        def checked(*given: Any, **named: Any) -> None:
            test(*given, **named)
            assert launched == set(kernels)

        return checked

    return mark


class Exact(ReferenceOps):
    """The formulas in FP64; q8_0 products read the 16-bit codes of their rows (decision record 0071)."""

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        x = coded(x_TI.float()).double() if weight_OI.format == "q8_0" else x_TI.double()
        return x @ dense(weight_OI).T


EXACT = Exact()


def dense(matrix: Matrix) -> torch.Tensor:
    data = matrix.data.double()
    if matrix.scales is not None:
        data = data * matrix.scales.double().repeat_interleave(32, dim=1)
    return data[:, : matrix.columns]


def go(record: Callable[[CudaOps], Any], *, position: int = 0, accepted: int = 0, **options: Any) -> list[torch.Tensor]:
    one = Run.new(**options).set(position=position, accepted=accepted)
    found = record(one.ops)
    one.go()
    return [x for x in (found if isinstance(found, tuple | list) else [found]) if x is not None]


def close(found: Sequence[torch.Tensor], expected: Any, what: str, bound: float = BOUND) -> None:
    wanted = [x for x in (expected if isinstance(expected, tuple | list) else [expected]) if x is not None]
    for number, (one, right) in enumerate(zip(found, wanted, strict=True)):
        assert right.dtype == torch.float64
        error = (one.double() - right).abs().max() / right.abs().max().clamp_min(1.0)
        assert error < bound, f"{what}, result {number}: {float(error):.1e}"  # NaN fails


def double(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.double() for x in tensors]


# Products


@sweeps("linear.linears_1x1", "linear.linears_1x2", "linear.linears_2x2", "linear.linears_4x4_any",
        "linear.linears_8x4_any")  # fmt: skip
def test_products() -> None:
    """Outputs that leave a rest in every group of warps; few and many, since few take a row of weights a warp."""
    for columns in WIDTHS:
        weights = [random_matrix(outputs, columns, format) for format, outputs in zip(FORMATS, (5, 9, 7), strict=True)]
        for rows in ROWS:
            x = noise(rows, columns)
            found = go(lambda ops, x=x, weights=weights: ops.linears(x, weights), multiprocessors=1)
            close(found, [EXACT.linear(x, one) for one in weights], f"{rows} rows of {columns}")
            if rows < 3:
                few = weights[rows % 2]
                close(
                    go(lambda ops, x=x, few=few: ops.linear(x, few), multiprocessors=1),
                    EXACT.linear(x, few),
                    f"few, {columns}",
                )


@sweeps("linear.linears_1x1_any", "linear.linears_1x2_any", "linear.linears_2x2_any", "linear.linears_4x4_any",
        "linear.linears_8x4_any")  # fmt: skip
def test_products_of_gated_rows() -> None:
    for columns in WIDTHS:
        weights = [random_matrix(outputs, columns, format) for format, outputs in zip(FORMATS, (3, 31, 7), strict=True)]
        for rows in ROWS:
            gate, x = noise(rows, columns), noise(rows, columns, seed=9)
            for number, kind in enumerate(("sigmoid", "silu", "sigmoid")):
                one = weights[number]

                def record(ops: CudaOps, one: Matrix = one, kind: Any = kind) -> torch.Tensor:
                    return ops.gated_linear(gate, x, one, kind)  # noqa: B023 - runs at once

                expected = EXACT.gated_linear(*double(gate, x), one, kind)
                # A code of 16 bits on its border may go either way.
                bound = 3e-5 if one.format == "q8_0" else BOUND
                close(go(record, multiprocessors=1), expected, f"{rows} rows of {columns}, {kind}", bound)


@sweeps("linear.embedding")
def test_embedding() -> None:
    for columns in WIDTHS:
        for format in FORMATS:
            table = random_matrix(11, columns, format)
            for rows in ROWS:
                ids = [(3 * row + rows) % 11 for row in range(rows)]
                one = Run.new().set(ids)
                found = one.ops.embedding([0] * rows, table)
                one.go()
                assert torch.equal(found.double(), dense(table)[ids]), (rows, columns, format)


# Row by row


@sweeps("pointwise.rms_norm", "pointwise.pairwise", "pointwise.sigmoid_scale", "pointwise.start_streams")
def test_rows_of_norms_gates_and_sums() -> None:
    for columns in WIDTHS:
        weight = noise(columns)
        for rows in ROWS:
            x, y, gate = noise(rows, columns), noise(rows, columns, seed=5), noise(rows, 1)

            def record(ops: CudaOps) -> list[torch.Tensor]:
                total = ops.add(x, y)  # noqa: B023 - runs at once
                return [
                    ops.rms_norm(total, weight, 1e-6), total, ops.rms_norm(x, weight, 1e-6, plus_one=True),  # noqa: B023
                    ops.silu_mul(x, y), ops.sigmoid_mul(x, y), ops.sigmoid_mul(gate, y), ops.add_gated(x, gate, y),  # noqa: B023
                    ops.start_streams(x, 4),  # noqa: B023
                ]  # fmt: skip

            (a, b, g, w), total = double(x, y, gate, weight), (x + y).double()
            close(go(record), [
                EXACT.rms_norm(total, w, 1e-6), total, EXACT.rms_norm(a, w, 1e-6, plus_one=True),
                EXACT.silu_mul(a, b), EXACT.sigmoid_mul(a, b), g.sigmoid() * b, a + g.sigmoid() * b,
                EXACT.start_streams(a, 4),
            ], f"{rows} rows of {columns}")  # fmt: skip


@sweeps("pointwise.rms_norm", "pointwise.rope", "heads.take_rows", "delta.gated_norm")
def test_rows_of_heads() -> None:
    """Norms, angles, gates and the way to the caches, at the head widths and counts of released models."""
    for heads, width, half in ((32, 128, 64), (24, 256, 32), (5, 65, 9)):
        weight = noise(width)
        for rows in ROWS:
            x, k, z, angle = (
                noise(rows, heads, width),
                noise(rows, 2, width),
                noise(rows, heads, width, seed=3),
                noise(rows, half),
            )
            cos, sin = angle.cos(), angle.sin()
            keys, values = torch.full((20, 2, width), torch.nan), torch.full((20, 2, width), torch.nan)
            one = Run.new().set(position=7)
            ops = one.ops
            found = [ops.rms_norm(x, weight, 1e-6), ops.rope(x, cos, sin), ops.gated_norm(x, z, weight, 1e-6, "silu")]
            ops.settle()
            found += ops.norm_rope([(x, weight), (k, weight)], 1e-6, cos, sin, plus_one=True)
            one.program.appended.append(KeyValueRows(found[-1], k, keys, values))
            ops.settle_rows()
            one.go()
            a, b, c, w, co, si = double(x, k, z, weight, cos, sin)
            normed = [EXACT.rope(EXACT.rms_norm(h, w, 1e-6, plus_one=True), co, si) for h in (a, b)]
            expected = [EXACT.rms_norm(a, w, 1e-6), EXACT.rope(a, co, si), EXACT.gated_norm(a, c, w, 1e-6, "silu")]
            close([*found, keys[7 : 7 + rows]], [*expected, *normed, normed[1]], f"{rows} rows, {heads} x {width}")
            assert torch.equal(values[7 : 7 + rows], k)
            for cache in (keys, values):
                assert cache[:7].isnan().all()
                assert cache[7 + rows :].isnan().all()


@sweeps("pointwise.router", "pointwise.argmax_parts", "pointwise.argmax_rows")
def test_choices() -> None:
    for columns, top_k in ((31, 8), (32, 8), (128, 8), (129, 10), (511, 8), (512, 10)):
        for rows in ROWS:
            logits = noise(rows, columns)
            ids, weights = go(lambda ops, x=logits, k=top_k: ops.router(x, k, renormalise=True))
            order = sorted(range(columns), key=lambda e: -float(logits[rows - 1, e]))[:top_k]
            assert ids[rows - 1].tolist() == order
            assert torch.equal(ids.long(), logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k])
            picked = logits.double().softmax(-1).gather(-1, ids.long())
            close([weights], picked / picked.sum(-1, keepdim=True), f"{rows} rows of {columns} experts")
    for columns in (4095, 4096, 4097, 8200):
        for rows in ROWS:
            logits = noise(rows, columns).round(decimals=1)  # many ties, which go to the lowest
            (ids,) = go(lambda ops, x=logits: ops.argmax_rows(x))
            assert ids.tolist() == [int(np.argmax(row)) for row in logits.numpy()], (rows, columns)


@sweeps("state.rotary_rows", "state.copy_in")
def test_rows_of_angles_and_of_the_host() -> None:
    table = noise(40, 32)
    for rows in ROWS:
        one = Run.new().set(position=21)
        rotary = RecordedRotary(one.program, one.inputs, table.cos(), table.sin())
        found = [*rotary.rows(0, rows), *rotary.at(range(0, 4 * rows, 4))]
        host, target = noise(rows, 2560 + rows), one.program.empty(rows, 2560 + rows)
        record_copy_in(one.program, Address(host.data_ptr()), target)
        one.go()
        at = torch.arange(20, 20 + 4 * rows, 4).clamp_max(39)
        wanted = [
            *(f[21 : 21 + rows] for f in (table.cos(), table.sin())),
            *(f[at] for f in (table.cos(), table.sin())),
        ]
        assert all(torch.equal(a, b) for a, b in zip([*found, target], [*wanted, host], strict=True)), rows


# Streams


def mix(x_TSH: torch.Tensor, weights: HyperWeights) -> list[torch.Tensor]:
    """By its definition; what a q8_0 product reads is coded: a stream times 1 + norm, and the low rank."""
    rows, streams, columns = x_TSH.shape
    x, factor = x_TSH.double(), 1.0 + weights.norm_SH.double()
    inverse = (x.square().mean(-1, keepdim=True) + weights.eps).rsqrt()

    def sums(matrix: Matrix) -> torch.Tensor:
        read = (x * factor).float()
        read = coded(read) if matrix.format == "q8_0" else read
        return (torch.einsum("tsh,fsh->tsf", read.double(), dense(matrix).view(-1, streams, columns)) * inverse).mean(1)

    low = EXACT.linear(torch.nn.functional.silu(sums(weights.down)), weights.up)
    u = (low.view(rows, streams, columns).sigmoid() * x * inverse * factor).mean(1)
    return [u] if weights.inject is None else [u, 2.0 * sums(weights.inject).sigmoid()]


def mixer(columns: int, rank: int, format: str, *, inject: bool) -> HyperWeights:
    down, up = random_matrix(rank, 4 * columns, format), random_matrix(4 * columns, rank, format)
    return HyperWeights(
        noise(4, columns) * 0.2, down, up, random_matrix(4, 4 * columns, format, 2) if inject else None, 1e-6
    )


@pytest.mark.slow
@sweeps(*(f"streams.mix_{way}_{format}_{size}" for way in ("down", "up") for format in ("q8_0", "bf16")
          for size in (1, 2, 4, 8)))  # fmt: skip
def test_mixes_of_the_usual_shape() -> None:
    """At the released width the two formats take turns: it is the most that is emulated here."""
    for columns, rank in ((512, 320), (2560, 32)):
        for format in ("q8_0", "bf16"):
            weights = mixer(columns, rank, format, inject=rank == 32)
            for rows in ROWS if columns == 512 else ROWS[format == "bf16" :: 2]:
                x = noise(rows, 4, columns)
                found = go(lambda ops, x=x, weights=weights: ops.hyper_mix(x, weights))
                close(found, mix(x, weights), f"{rows} rows of {columns}, {format}", 2e-5)


@pytest.mark.slow
@sweeps(*(f"streams.mix_{way}_any_{size}" for way in ("down", "up") for size in (1, 8)), "streams.hyper_add",
        "streams.ngram_gate")  # fmt: skip
def test_streams_of_any_shape() -> None:
    for columns, format in ((511, "f32"), (513, "bf16"), (640, "q8_0"), (2560, "f32")):
        weights, norms = (
            mixer(columns, 5, format, inject=True),
            NgramWeights(*(noise(4, columns, seed=i) * 0.2 for i in range(3)), 1e-6),
        )
        for rows in ROWS:
            x, key, y, c = (
                noise(rows, 4, columns),
                noise(rows, 4, columns, seed=2),
                noise(rows, columns),
                noise(rows, 4),
            )

            def record(ops: CudaOps) -> list[torch.Tensor]:
                added = ops.hyper_add(x, c, y)  # noqa: B023 - runs at once
                ops.settle()
                found = [t for t in ops.hyper_mix(x, weights) if t is not None]  # noqa: B023
                return [added, *found, *ops.ngram_gate(key, y, x, norms)]  # noqa: B023

            x64, key64, y64, c64 = double(x, key, y, c)
            exact = NgramWeights(*double(norms.norm_key_SH, norms.norm_query_SH, norms.norm_conv_SH), 1e-6)
            gated = EXACT.ngram_gate(key64, y64, x64, exact)
            expected = [x64 + c64[:, :, None] * y64[:, None], *mix(x, weights), *gated]
            close(go(record), expected, f"{rows} rows of {columns}", 2e-5)


# Attention and its index


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, lists: list[list[int]] | None = None
) -> torch.Tensor:
    q, k, v = double(q, k, v)
    out, share = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for t in range(len(q)):
        at = list(range(start + t + 1)) if lists is None else lists[t]
        for n in range(q.shape[1]):
            out[t, n] = (k[at, n // share] @ q[t, n] * scale).softmax(-1) @ v[at, n // share]
    return out


@pytest.mark.slow
@sweeps(*(f"attention.attend_{kind}_{size}" for kind in ("f32", "bf16") for size in (8, 16, 32, "any")),
        "attention.attend_combine")  # fmt: skip
def test_attention() -> None:
    """Heads of released models, starts around a cut of 64; in half of the cases over lists of blocks."""
    for kv_heads, share, width in ((2, 3, 64), (1, 8, 128), (1, 12, 256), (1, 5, 20)):
        for dtype in (torch.float32, torch.bfloat16):
            for rows in ROWS:
                start = (0, 55, 61, 130)[rows % 4]
                q, scale = noise(rows, kv_heads * share, width), width**-0.5
                k, v = (noise(150, kv_heads, width, seed=i).to(dtype) for i in (1, 2))
                k[start + rows :], v[start + rows :] = torch.nan, torch.nan
                what = f"{rows} rows, {kv_heads} x {share} heads of {width}, {dtype}, at {start}"
                found = go(lambda ops: ops.attention(q, k, v, 0, scale), position=start)  # noqa: B023 - at once
                close(found, attended(q, k, v, start, scale), what, 1e-5)
                if rows % 2 == 0:
                    continue
                blocks, lists = torch.full((rows, 9), -1, dtype=torch.int32), []
                for t in range(rows):
                    complete = (start + t + 1) // 4
                    ids = list(range(complete))[:: max(1, complete // 9 + 1)]
                    blocks[t, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
                    tail = range(complete * 4, start + t + 1)
                    lists.append([4 * b + j for b in ids for j in range(4)] + list(tail))
                found = go(lambda ops: ops.sparse_attention(q, k, v, 0, scale, blocks, 4), position=start)  # noqa: B023
                close(found, attended(q, k, v, start, scale, lists), f"{what}, listed", 1e-5)


@sweeps("index.score_blocks", "index.select_blocks", "heads.take_rows")
def test_index() -> None:
    """Scores of small integers are exact and have ties. Keys of blocks go to no cache here."""
    random = torch.Generator().manual_seed(4)
    keys = torch.randint(-3, 4, (70, 128), generator=random).float()
    for rows in ROWS:
        for start in (0, 3, 70 * 4 - 8):
            q = torch.randint(-3, 4, (rows, 4, 128), generator=random).float()
            visible = keys.clone()
            visible[(start + rows) // 4 :] = torch.nan  # not written yet
            (found,) = go(lambda ops: ops.select_blocks(q, visible, 0, 4, 16), position=start)  # noqa: B023 - at once
            for t in range(rows):
                complete = (start + t + 1) // 4
                scores = (q[t].double() @ keys[:complete].double().T).relu().sum(0).tolist()
                best = sorted(sorted(range(complete), key=lambda b: (-scores[b], b))[:16])
                assert found[t].tolist() == best + [-1] * (16 - len(best)), (rows, start, t)
        raw, weight, angle = noise(rows, 4, 128), noise(128), noise(rows, 32)
        made = go(lambda ops: ops.index_block_keys(raw, weight, 1e-6, angle.cos(), angle.sin()))  # noqa: B023
        expected = EXACT.index_block_keys(*double(raw, weight), 1e-6, *double(angle.cos(), angle.sin()))
        close(made, expected, f"{rows} keys")


# The gated delta net

Shape = tuple[int, int, int, int, int]
DELTA: dict[int | str, Shape] = {
    8: (1, 2, 32, 33, 4), 32: (2, 6, 128, 40, 4), 64: (1, 2, 256, 33, 4), "head": (2, 6, 128, 128, 4),
}  # fmt: skip


def exact_weights(weights: DeltaWeights) -> DeltaWeights:
    tensors = double(weights.conv_CW, weights.log_decay_N, weights.dt_bias_N)
    return DeltaWeights(*tensors, weights.key_heads, weights.value_heads, weights.key_width, weights.value_width)


def rows_of(made: DeltaRows, change: Callable[[torch.Tensor], torch.Tensor]) -> DeltaRows:
    return DeltaRows(*(change(x) for x in (made.k_TGD, made.v_TNV, made.beta_TN, made.g_TN)))


@sweeps(
    "delta.causal_conv", "delta.delta_inputs", "delta.gated_delta_8", "delta.gated_delta_32", "delta.gated_delta_64"
)
def test_delta_by_single_operations() -> None:
    """All row counts, each with another number of rows to fold."""
    for shape in DELTA.values():
        weights = steps.weights_of(shape)
        _, heads, key_width, width, taps = shape
        for rows in ROWS:
            one, tail = steps.window(weights, rows, rows), noise(taps - 1, weights.conv_CW.shape[0])
            pending = rows_of(
                EXACT.delta_inputs(*double(noise(8, tail.shape[1]), tail, noise(8, heads), noise(8, heads, seed=2)),
                                   exact_weights(weights))[1],
                torch.Tensor.float,
            )  # fmt: skip
            accepted, state = (3 * rows) % 9, noise(heads, key_width, width)
            exact = state.double()
            for kept in vars(pending).values():
                kept[accepted:] = torch.nan
            run = Run.new().set(accepted=accepted)
            q, made = run.ops.delta_inputs(one.qkv_TC, tail, one.b_TN, one.a_TN, weights)
            out = run.ops.gated_delta(q, made, state, pending, write=False)
            mixed = run.ops.causal_conv(one.qkv_TC, tail, weights.conv_CW)
            run.go()
            q64, made64 = EXACT.delta_inputs(*double(one.qkv_TC, tail, one.b_TN, one.a_TN), exact_weights(weights))
            out64 = EXACT.gated_delta(
                q64, made64, exact, rows_of(pending.first(accepted), torch.Tensor.double), write=False
            )
            mixed64 = EXACT.causal_conv(*double(one.qkv_TC, tail, weights.conv_CW))
            close([q, *vars(made).values(), out, state, mixed], [q64, *vars(made64).values(), out64, exact, mixed64],
                  f"{rows} rows of {shape}, {accepted} folded", 2e-5)  # fmt: skip


@sweeps("delta_step.delta_step_8", "delta_step.delta_step_32", "delta_step.delta_step_64", "delta_step.delta_step_head")
def test_delta_in_one_launch() -> None:
    """Rounds of every size one after the other, of which all, none or some rows are accepted."""
    for name, shape in DELTA.items():
        weights = steps.weights_of(shape)
        exact = exact_weights(weights)
        _, heads, key_width, width, taps = shape
        state, tail = noise(heads, key_width, width), noise(taps - 1, weights.conv_CW.shape[0])
        kept = steps.Kept(weights, state, tail)
        state, tail, pending = state.double(), tail.double(), None
        for number, rows in enumerate((*ROWS, 3, 8, 1)):
            one = steps.window(weights, rows, number)
            norm = steps.Norm(noise(rows, heads, width, seed=number), noise(width), "silu")
            is_normed = name == "head" and number % 2 == 0
            found = kept.round(one, norm=norm if is_normed else None)
            q, made = EXACT.delta_inputs(*double(one.qkv_TC), tail, *double(one.b_TN, one.a_TN), exact)
            expected = EXACT.gated_delta(q, made, state, pending, write=False)
            if is_normed:
                expected = EXACT.gated_norm(expected, *double(norm.z_TNV, norm.weight_V), 1e-6, "silu")
            close([found, kept.state], [expected, state], f"round {number} of {rows} rows, {shape}", 3e-5)
            accepted = (rows, rows - 1, 0, rows)[number % 4]
            kept.commit(accepted)
            pending = made.first(accepted)
            tail = torch.cat((tail, one.qkv_TC.double()[:accepted]))[-len(tail) :]


# Experts and the round

EXPERT_SIZES = ((5120, 16), (2560, 16), (513, 16), (511, 33), (16, 640), (16, 768), (20, 513))


@pytest.mark.slow
@sweeps(
    "expert.quantise_rows", *(f"expert.{format}_{way}" for format in experts.FORMATS for way in ("gate_up", "down"))
)
def test_experts() -> None:
    """The bits of the CPU's, which the mirror of its own tests has; a few outputs at each width that is summed over."""
    for hidden, inner in EXPERT_SIZES:
        for format in experts.FORMATS:
            layout = ExpertLayout(hidden, inner, format)
            blobs, scales = experts.random_experts(layout, 2)
            for rows in ROWS:
                x = noise(rows, hidden, seed=inner)
                ids = np.zeros((rows, 1), np.int32)
                ids[rows // 3 : rows // 2] = 1
                experts.same(layout, blobs, scales, x, ids, backward=rows % 2 == 0)


@sweeps("expert.combine_parts")
def test_sums_over_experts() -> None:
    for columns in WIDTHS:
        for rows in ROWS:
            program, machine = EmulatedProgram(), EmulatedMachine()
            parts, weights, y = noise(rows, 10, columns), noise(rows, 10), program.empty(rows, columns)
            flags = program.zeros(rows, dtype=torch.uint8)
            program.launch(
                "expert.combine_parts", (rows, -(-columns // 256)), 256, parts, weights, 10, columns, y, flags
            )
            machine.prepare(program.take()).run()
            machine.synchronize()
            program.check_guards()
            close([y], (parts.double() * weights.double()[..., None]).sum(1), f"{rows} rows of {columns}")
            assert not flags.any()


@sweeps("round.begin", "round.route_1x1", "round.route_1x2", "round.route_2x2", "round.route_4x4", "round.route_8x4",
        "round.combine", "round.publish", "expert.nvfp4_gate_up", "expert.nvfp4_down")  # fmt: skip
@pytest.mark.parametrize("hidden", [513, 2560])
def test_rounds(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared expert's last product and a router in the experts' first launch; experts on both sides."""
    bench = rounds.make("nvfp4", hidden=hidden, inner=17)
    try:
        bench.place("vcpvccvcvpcv")
        for rows in ROWS:
            x, _, _ = rounds.inputs(rows, rows, hidden)
            logits = [noise(rows, rounds.EXPERTS, seed=layer) for layer in range(rounds.LAYERS)]
            gate, up = noise(rows, 640), noise(rows, 640, seed=1)
            down = [random_matrix(outputs, 640, "bf16") for outputs in (hidden, 9)]

            def record(ops: CudaOps, step: Any) -> list[torch.Tensor]:
                found = []
                for layer in range(rounds.LAYERS):
                    product = ops.gated_linear(gate, up, down[layer], "silu")  # noqa: B023 - runs at once
                    ids, weights = ops.router(logits[layer], rounds.TOP_K, renormalise=True)  # noqa: B023
                    found += [product, ids, weights, step(layer, x, ids, weights)]  # noqa: B023
                return found

            found = bench.record(x, record)
            for layer in range(rounds.LAYERS):
                product, ids, weights, _ = found[4 * layer : 4 * layer + 4]
                close([product], EXACT.gated_linear(*double(gate, up), down[layer], "silu"), f"{rows} rows of {hidden}")
                order = logits[layer].sort(dim=-1, descending=True, stable=True).indices[:, : rounds.TOP_K]
                assert torch.equal(ids.long(), order)
                picked = logits[layer].double().softmax(-1).gather(-1, order)
                close([weights], picked / picked.sum(-1, keepdim=True), f"{rows} rows of {hidden}")
            both = [[found[4 * layer + i] for layer in range(rounds.LAYERS)] for i in (1, 2, 3)]
            for layer in range(rounds.LAYERS):
                wanted = rounds.expected(bench, x, both[0], both[1][layer])
                rounds.same([both[2][layer]], [wanted[layer]])
    finally:
        bench.conductor.close()
        bench.mailbox.close()


def test_every_kernel_is_swept() -> None:
    """By the names in the compiled files, so that those which macros make count too. Kernels of prompts take other
    numbers of rows: ``test_cuda_prompt.py`` has them."""
    there = set()
    for file in list_kernels():
        if next(PACKAGE.rglob(f"{file}.cu")).parent.name == "prompt":
            continue
        library = Path(load(file)._library._name).read_bytes()
        names = re.findall(rb"(?<=\0)emulated_(?!strata_)(\w+)(?=\0)", library)  # strata_: the emulation's own
        there |= {f"{file}.{name.decode()}" for name in names}
    swept = {name for names in SWEPT.values() for name in names}
    assert there - swept - set(ELSEWHERE) == set(), "kernels that no test of this file launches"
    assert (swept | set(ELSEWHERE)) - there == set(), "kernels that are not there any more"
    assert not swept & set(ELSEWHERE)
