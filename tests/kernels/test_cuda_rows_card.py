"""The row kernels on a card, at the sizes of models: near the reference, and the same bits for 8 rows and for 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from strata.kernels.cuda.cuda_device import CudaDevice, open_device
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import MAX_WINDOW, Program, RoundInputs
from strata.kernels.ops import DeltaRows, DeltaWeights, HyperWeights, Matrix
from strata.kernels.reference import ReferenceOps
from tests.kernels.cuda_runs import FORMATS, CodedReference, equal, noise, random_matrix

pytestmark = pytest.mark.gpu
POSITION = 3000


@pytest.fixture(scope="module")
def card() -> Iterator[CudaDevice]:
    with open_device(0) as device:
        yield device


def on(device: torch.device, value: Any) -> Any:
    """Tensors of a value, however deep, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(on(device, one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: on(device, getattr(value, f.name)) for f in fields(value)})
    return value


def rows_of(value: Any, rows: slice) -> Any:
    return type(value)(*(one[rows] for one in vars(value).values())) if isinstance(value, DeltaRows) else value[rows]


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.cpu()]
    if value is None:
        return []
    return [x for one in (vars(value).values() if isinstance(value, DeltaRows) else value) for x in flat(one)]


def compare(
    card: CudaDevice, record: Callable[..., Any], rowwise: list[Any], fixed: list[Any], **bounds: float
) -> None:
    """``record(ops, *rowwise, *fixed)`` on the card for 8 rows, against the reference and against each row alone."""
    device, reference = card.machine.device, record(CodedReference(), *rowwise, *fixed)
    fixed = on(device, fixed)

    def run(rows: slice) -> list[torch.Tensor]:
        program = Program(device, card.machine.multiprocessors)
        inputs = RoundInputs.on(device)
        inputs.position[0] = POSITION + rows.start
        ops = CudaOps(program, inputs)
        found = record(ops, *on(device, [rows_of(one, rows) for one in rowwise]), *fixed)
        ops.settle()
        torch.cuda.synchronize(device)
        card.machine.prepare(program.take()).run()
        card.machine.synchronize()
        return flat(found)

    whole = run(slice(0, MAX_WINDOW))
    for one, expected in zip(whole, flat(reference), strict=True):
        torch.testing.assert_close(one, expected, rtol=bounds.get("rtol", 2e-5), atol=bounds.get("atol", 2e-5))
    for t in range(MAX_WINDOW):
        for one, alone in zip(whole, run(slice(t, t + 1)), strict=True):
            assert equal(one[t : t + 1], alone), f"row {t} depends on the others"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("columns", "outputs"), [(2560, [12288, 512, 512, 128]), (6144, [2560]), (640, [2560]), (70, [9])]
)
def test_products(card: CudaDevice, format: str, columns: int, outputs: list[int]) -> None:
    weights = [random_matrix(size, columns, format) for size in outputs]
    compare(card, lambda ops, x, w: ops.linears(x, w), [noise(8, columns)], [weights])


def test_router_and_largest_logit(card: CudaDevice) -> None:
    logits = noise(8, 512) * 3
    logits[2] = (logits[2] * 2).round() / 2
    compare(card, lambda ops, x: ops.router(x, 10, renormalise=True), [logits], [])
    wide = noise(8, 248_320).half().float()  # ties
    largest = torch.tensor(ReferenceOps().argmax(wide), dtype=torch.int32)

    def record(ops: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops.argmax_rows(x) if isinstance(ops, CudaOps) else largest
        return found

    compare(card, record, [wide], [])


def test_norms(card: CudaDevice) -> None:
    angle = noise(8, 32)
    compare(card, lambda ops, x, w: ops.rms_norm(x, w, 1e-6), [noise(8, 2560)], [noise(2560)])
    compare(
        card,
        lambda ops, q, k, c, s, w: ops.norm_rope([(q[:, :, 0], w), (k, w)], 1e-6, c, s, plus_one=True),
        [noise(8, 24, 2, 256), noise(8, 2, 256), angle.cos(), angle.sin()],
        [noise(256)],
    )


@pytest.mark.parametrize("format", FORMATS)
def test_mixers(card: CudaDevice, format: str) -> None:
    weights = HyperWeights(
        noise(4, 2560), random_matrix(320, 10240, format), random_matrix(10240, 320, format),
        random_matrix(4, 10240, format, 2), 1e-6,
    )  # fmt: skip

    def record(ops: Any, x: torch.Tensor, c: torch.Tensor, y: torch.Tensor, mixer: HyperWeights) -> Any:
        streams = ops.hyper_add(x, c, y)
        return [*ops.hyper_mix(streams, mixer), streams]

    bound = 1e-4 if format == "q8_0" else 2e-5  # 16-bit codes of rows cost about 3e-5
    compare(card, record, [noise(8, 4, 2560), noise(8, 4), noise(8, 2560)], [weights], rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(card: CudaDevice, dtype: torch.dtype) -> None:
    keys, values = (noise(4096, 2, 256, seed=i).to(dtype) for i in range(2))
    compare(
        card, lambda ops, q, k, v: ops.attention(q, k, v, POSITION, 1 / 16), [noise(8, 24, 256)], [keys, values],
        atol=1e-4,
    )  # fmt: skip

    def sparse(ops: Any, q: torch.Tensor, index_q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Any) -> Any:
        blocks = ops.select_blocks(index_q, index, POSITION, 4, 512)
        return [blocks, ops.sparse_attention(q, k, v, POSITION, 1 / 16, blocks, 4)]

    integers = [
        torch.randint(-2, 3, s, generator=torch.Generator().manual_seed(1)).float() for s in ((8, 4, 128), (1024, 128))
    ]
    compare(card, sparse, [noise(8, 24, 256), integers[0]], [keys, values, integers[1]], atol=1e-4)


def test_delta_net(card: CudaDevice) -> None:
    weights = DeltaWeights(noise(10240, 4), noise(48), noise(48, seed=3), 16, 48, 128, 128)
    state, z = noise(48, 128, 128) * 0.1, noise(8, 48, 128, seed=4)
    inputs = ReferenceOps().delta_inputs(noise(8, 10240), noise(3, 10240), noise(8, 48), noise(8, 48), weights)
    q, rows = inputs
    device = card.machine.device

    def run(size: int) -> torch.Tensor:
        """Outputs of 8 rows in windows of ``size``, each folding the one before."""
        now, kept = state.to(device, copy=True), on(device, rows)
        pending = DeltaRows(*(torch.zeros_like(x) for x in vars(kept).values()))
        found = []
        for first in range(0, 8, size):
            program, round_inputs = Program(device, card.machine.multiprocessors), RoundInputs.on(device)
            round_inputs.accepted[0] = size if first else 0
            ops, part = CudaOps(program, round_inputs), slice(first, first + size)
            found.append(ops.gated_delta(q[part].to(device), rows_of(kept, part), now, pending, write=False))
            torch.cuda.synchronize(device)
            card.machine.prepare(program.take()).run()
            card.machine.synchronize()
            for to, new in zip(vars(pending).values(), vars(kept).values(), strict=True):
                to[:size] = new[part]
            torch.cuda.synchronize(device)
        return torch.cat(found).cpu()

    whole = run(8)
    torch.testing.assert_close(
        whole, ReferenceOps().gated_delta(q, rows, state.clone(), None, write=False), rtol=1e-4, atol=1e-5
    )
    for size in (1, 2, 4):
        assert equal(run(size), whole)
    matrix = random_matrix(2560, 6144, "q8_0")

    def output(ops: Any, o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, m: Matrix) -> torch.Tensor:
        result: torch.Tensor = ops.linear(ops.gated_norm(o, z, w, 1e-6, "sigmoid").flatten(1), m)
        return result

    compare(card, output, [whole, z], [noise(128), matrix])
