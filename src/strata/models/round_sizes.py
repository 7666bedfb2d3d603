"""Sizes that recorded rounds of every family share: what experts and attention keep for a row between launches.

Lives in ``models`` beside the families, whose ``round_bytes`` add up. The numbers are counts of the launches' operands,
held to what recording takes by a test. It must not import torch.
"""

from __future__ import annotations

__all__ = ["chunk_expert_bytes", "cut_values", "expert_values"]

CUT = 64  # attended positions that one block sums alone
SUPERBLOCK = 64  # values that rows of a prompt's experts are padded to
PITCH = 64  # values that an attention head's sums are padded to


def expert_values(hidden: int, intermediate: int, top_k: int) -> int:
    """FP32 values of a row: inputs in codes, each pick's inner activations and output, lists."""
    return hidden + top_k * (hidden + intermediate + 32)


def cut_values(heads: int, head_width: int, attended: int) -> int:
    """FP32 values of a row: sums of each head over each cut of what it attends."""
    pitch = -(-head_width // PITCH) * PITCH
    return heads * -(-attended // CUT) * (pitch + 2)


def chunk_expert_bytes(hidden: int, intermediate: int, top_k: int) -> int:
    """Of a row of a prompt's chunk: its input, what each of its experts keeps and gives in BF16, numbers for sorting,
    the sum in FP32."""
    wide, inner = -(-hidden // SUPERBLOCK) * SUPERBLOCK, -(-intermediate // SUPERBLOCK) * SUPERBLOCK
    return 2 * wide + 2 * top_k * (wide + inner) + 40 * top_k + 4 * hidden
