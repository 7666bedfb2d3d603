"""Runs recorded operations on the emulated card: for tests of single operations, and of whole models in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import MAX_WINDOW, RoundInputs, Runnable
from strata.kernels.ops import Matrix
from strata.kernels.reference import ReferenceOps
from tests.emulator.machine import EmulatedMachine, EmulatedProgram

FORMATS = ("f32", "bf16", "q8_0")


@dataclass
class Run:
    """An emulated program with its inputs; ``ops`` records, ``go`` runs what was recorded since."""

    program: EmulatedProgram
    inputs: RoundInputs
    ops: CudaOps
    machine: EmulatedMachine

    @classmethod
    def new(cls, *, backward: bool = False, multiprocessors: int = 3, **options: Any) -> Run:
        program = EmulatedProgram(multiprocessors)
        inputs = RoundInputs.on(program.device)
        machine = EmulatedMachine(backward=backward, multiprocessors=multiprocessors)
        options.setdefault("cache_bytes", machine.cache_bytes)
        return cls(program, inputs, CudaOps(program, inputs, **options), machine)

    def set(self, ids: Sequence[int] = (), position: int = 0, accepted: int = 0) -> Run:
        self.inputs.ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.inputs.position[0], self.inputs.accepted[0] = position, accepted
        return self

    def prepare(self) -> Runnable:
        self.ops.settle()
        return self.machine.prepare(self.program.take())

    def go(self) -> None:
        self.prepare().run()
        self.machine.synchronize()
        self.program.check_guards()


def run(record: Callable[[CudaOps], Any], *, position: int = 0, accepted: int = 0, **options: Any) -> Any:
    """What ``record`` returned, with values in it. The grid is small on purpose: blocks take turns."""
    one = Run.new(**options).set(position=position, accepted=accepted)
    found = record(one.ops)
    one.go()
    return found


class CodedReference(ReferenceOps):
    """The reference whose q8_0 products read 16-bit codes of their rows, by the rule of decision record 0071."""

    def linear(self, x_TI: torch.Tensor, weight_OI: Matrix) -> torch.Tensor:
        return super().linear(coded(x_TI) if weight_OI.format == "q8_0" else x_TI, weight_OI)


def coded(x: torch.Tensor) -> torch.Tensor:
    """Rows as their codes say, exact in FP32. See ``rows_mirror.code_row``, which this is held to."""
    columns = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -columns % 32)).unflatten(-1, (-1, 32)).double()
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest.clamp_min(2.0**-100)).exponent - 1).clamp_min(-100)
    unit = torch.ldexp(torch.ones_like(largest), exponent - 14)
    codes = torch.round(blocks / unit).clamp_max(32767)
    values = torch.where(largest < 2.0**96, codes * unit, torch.full_like(codes, torch.nan))
    return values.flatten(-2)[..., :columns].float()


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def random_matrix(rows: int, columns: int, format: str, seed: int = 0) -> Matrix:
    random = torch.Generator().manual_seed(seed * 7 + rows + columns)
    dense = torch.randn(rows, columns, generator=random) * columns**-0.5
    if format == "f32":
        return Matrix("f32", dense, columns)
    if format == "bf16":
        return Matrix("bf16", dense.bfloat16(), columns)
    blocks = -(-columns // 32)
    data = torch.randint(-128, 128, (rows, blocks * 32), generator=random, dtype=torch.int8)
    data[:, columns:] = 0
    scales = (torch.rand(rows, blocks, generator=random) + 0.5) * columns**-0.5 / 64
    return Matrix("q8_0", data, columns, scales.half())


def same_rows(record: Callable[[CudaOps, slice], Any], rows: int, **options: Any) -> None:
    """Row t of every result is the same bits in a window of all rows and in one of its own, on other grids, and in the
    other order of blocks and threads. ``record`` takes the rows it is to look at."""

    def found(rows: slice, **more: Any) -> list[torch.Tensor]:
        result = run(lambda ops: record(ops, rows), **{**options, **more})
        return [t for t in (result if isinstance(result, tuple | list) else [result]) if t is not None]

    whole = found(slice(0, rows))
    position = options.get("position", 0)
    for other in (found(slice(0, rows), backward=True), found(slice(0, rows), multiprocessors=1)):
        assert all(equal(a, b) for a, b in zip(whole, other, strict=True)), "it depends on the grid or on timing"
    for t in range(rows):
        alone = found(slice(t, t + 1), position=position + t)
        assert all(equal(a[t : t + 1], b) for a, b in zip(whole, alone, strict=True)), f"row {t} depends on the others"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits."""
    kind = torch.int32 if a.element_size() == 4 else torch.int64
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


assert MAX_WINDOW == 8
