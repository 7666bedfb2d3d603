"""What a round of a sequence leaves for the next one, in two copies: a round reads one and writes the other.

Lives beside the launches that read and write it (``delta_step.cu``, ``delta.cu``); a sequence's state owns the memory.
``RoundInputs.turn`` says which copy the last round has written, so a launch reads the rows of the round before while it
writes its own, and no block waits for another. It must not know models.

Legend: W rows of the widest window, U tail rows, C channels, N value heads, G key heads, D key width, V value width;
S the two copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.kernels.cuda.program import MAX_WINDOW

__all__ = ["DeltaRecord", "TailRecord"]


@dataclass(frozen=True, eq=False)
class TailRecord:
    """Inputs of a causal convolution: the U rows before a window, then the window's own W.

    The U rows before the next window begin at row ``RoundInputs.accepted`` of the copy that the last round has written.
    """

    rows_SRC: torch.Tensor  # R = U + W

    @classmethod
    def zeros(cls, tail_rows: int, channels: int, device: torch.device) -> TailRecord:
        return cls(torch.zeros(2, tail_rows + MAX_WINDOW, channels, device=device))

    @property
    def stand_in_UC(self) -> torch.Tensor:
        """What layers take for the tail and hand on: operations know the record by its address, nobody reads it."""
        return self.rows_SRC[0, : self.rows_SRC.shape[1] - MAX_WINDOW]


@dataclass(frozen=True, eq=False)
class DeltaRecord:
    """The rows of a gated delta net's window, of which the accepted ones are folded into the state, and its tail."""

    tail: TailRecord
    k_SWGD: torch.Tensor
    v_SWNV: torch.Tensor
    beta_SWN: torch.Tensor
    g_SWN: torch.Tensor

    @classmethod
    def zeros(cls, tail: TailRecord, state_NDV: torch.Tensor) -> DeltaRecord:
        heads, key_width, value_width = state_NDV.shape
        key_heads = (tail.rows_SRC.shape[2] - heads * value_width) // (2 * key_width)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(2, MAX_WINDOW, *shape, device=state_NDV.device)

        return cls(tail, zeros(key_heads, key_width), zeros(heads, value_width), zeros(heads), zeros(heads))

    @property
    def nbytes(self) -> int:
        """Without the tail's."""
        return sum(x.nbytes for x in (self.k_SWGD, self.v_SWNV, self.beta_SWN, self.g_SWN))
