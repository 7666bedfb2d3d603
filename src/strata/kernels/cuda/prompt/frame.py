"""The frames of a prompt on a card: what a pass computes, and how a prompt is cut.

Lives in ``kernels/cuda/prompt`` without torch, because plans know it too. Decision record 0131.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK_ROWS", "EDGE_ROWS", "FRAME_ROWS", "SHORT_ROWS", "TENSOR_ARCHITECTURE", "Frame", "frames_of"]

FRAME_ROWS = 2048  # library products of 8,192 rows are 30 % faster, but a short prompt pays for a whole frame
EDGE_ROWS = 512  # chunks of 'auto' are multiples
BLOCK_ROWS = 32  # of the delta rule (delta_blocks.cu): chunks and frames end with whole blocks
SHORT_ROWS = 128  # up to so many rows are read as windows: they pick few of a layer's experts, a chunk streams all
TENSOR_ARCHITECTURE = 80  # the oldest with BF16 on its tensor cores; older cards read prompts as windows


@dataclass(frozen=True)
class Frame:
    """A pass: ``rows`` positions from ``start`` on, of which [first, stop), counted from the start, are the chunk's."""

    start: int
    rows: int
    first: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.start + self.rows


def frames_of(first: int, stop: int, rows: int) -> list[Frame]:
    """The frames that hold positions [first, stop)."""
    starts = range(first // rows * rows, stop, rows)
    return [Frame(start, rows, max(0, first - start), min(rows, stop - start)) for start in starts]
