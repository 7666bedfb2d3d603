"""Rotary values of the rows of a recorded round, gathered from a whole table by the position in device memory.

Lives beside ``state.cu``. It stands in for ``layers.rope.RopeTable`` while a program is recorded. It must not know
models or layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strata.kernels.cuda.program import Program, RoundInputs

__all__ = ["RecordedRotary"]


class RecordedRotary:
    """``cos_PR`` and ``sin_PR`` hold every position a sequence may have. Values are gathered once a program."""

    def __init__(self, program: Program, inputs: RoundInputs, cos_PR: torch.Tensor, sin_PR: torch.Tensor) -> None:
        self._program, self._inputs = program, inputs
        self._cos_PR, self._sin_PR = cos_PR, sin_PR
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_TR, sin_TR) of ``count`` rows from the committed position; ``start`` is not looked at."""
        return self._gather(count, 0)

    def at(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_BR, sin_BR) of the first positions of consecutive blocks, the first of which holds the committed
        position: of a range only the number and the step are looked at."""
        assert isinstance(positions, range), "a recorded index asks for blocks"
        return self._gather(len(positions), positions.step)

    def _gather(self, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = self._made.get((count, block))
        if made is None:
            positions, half = self._cos_PR.shape
            made = self._program.empty(count, half), self._program.empty(count, half)
            self._program.launch(
                "state.rotary_rows", (count,), 32, self._cos_PR, self._sin_PR, half, positions, block, *made,
                self._inputs.position,
            )  # fmt: skip
            self._made[count, block] = made
        return made
