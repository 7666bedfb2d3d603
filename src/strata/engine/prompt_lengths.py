"""Which prompts an arm of ``strata verify`` reads: lengths at the edges of the blocks that kernels cut rows into.

Lives in ``engine`` because blocks of kernels, the dispatcher's classes and chunks meet here. No length is written down:
each comes from a size that the code itself uses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from strata.engine.identity import Script
from strata.errors import ConfigError
from strata.experts.dispatch import LOOK_AHEAD_ROWS, WINDOW_ROWS
from strata.kernels.cpu.blocks import row_blocks
from strata.kernels.cuda.prompt.frame import FRAME_ROWS, SHORT_ROWS

__all__ = ["CHUNK", "LONG_CHUNK", "LengthPlan", "Plays", "block_sizes", "classes_of_rows", "edges"]

PAST = 5  # rows behind a block that a kernel of few rows takes
CHUNK = 512  # rows of the prompt chunks of an arm, unless it is there for longer ones
LONG_CHUNK = 2 * CHUNK
FEW, MANY = 8, 64  # tokens decoded after most prompts and after two

Plays = Literal["classes", "edges", "tails", "chunks"]
"""One length of each of the dispatcher's classes, every edge of a block, those behind a block, or what longer chunks
change."""


def block_sizes(*, on_card: bool = False) -> tuple[int, ...]:
    """Where kernels and the dispatcher change their path, rising."""
    sizes = {*row_blocks().values(), WINDOW_ROWS, LOOK_AHEAD_ROWS}
    if on_card:
        from strata.kernels.cuda.program import MAX_WINDOW

        sizes |= {MAX_WINDOW, SHORT_ROWS}
    return tuple(sorted(sizes))


def edges(blocks: Iterable[int]) -> tuple[int, ...]:
    """Each block less one, itself, more one, and ``PAST`` more."""
    return tuple(sorted({n for block in blocks for n in (block - 1, block, block + 1, block + PAST) if n > 0}))


def classes_of_rows(*, on_card: bool = False) -> tuple[range, ...]:
    """Row counts that take the same path everywhere, rising, up to more than a chunk."""
    starts = [1, *(n for block in block_sizes(on_card=on_card) for n in (block, block + 1)), LONG_CHUNK + 1]
    starts = sorted(set(starts))
    return tuple(range(first, stop) for first, stop in itertools.pairwise(starts))


@dataclass(frozen=True)
class LengthPlan:
    """What arms read. ``whole``: every arm every edge, and those of longer chunks where its chunks are longer."""

    classes: tuple[int, ...]
    edges: tuple[int, ...]
    tails: tuple[int, ...]
    chunks: tuple[int, ...]
    script: Script  # tokens and windows of every arm
    whole: bool = False
    in_windows: int | None = None  # rows of a prompt that windows read as well as chunks; None: of any

    @classmethod
    def of_kernels(
        cls, positions: int, tokens: int | None, *, on_card: bool = False, whole: bool = False
    ) -> LengthPlan:
        """``tokens`` None: a few after most prompts and many after two. ``positions``: what the context holds; longer
        prompts are cut to it. Raises ``ConfigError`` where nothing fits."""
        most = tokens or MANY
        room = positions - most - max(Script(()).windows)
        if room < 1:
            raise ConfigError(f"{most} tokens do not fit a context of {positions:,}", "give fewer --tokens")
        blocks = block_sizes(on_card=on_card)
        of_rows = row_blocks()
        one_each = (1, of_rows["kPackRows"] + PAST, of_rows["kBlockRows"] + 1, LOOK_AHEAD_ROWS + 1)
        many_after = one_each[1:3]
        script = Script((), most, few_tokens=None if tokens else FEW, long_after=_cut(many_after, room))
        at_edges = _cut((*one_each, *edges(blocks)), room)
        in_windows = SHORT_ROWS if on_card else None  # longer ones run on tensor cores
        tails = _cut((n for block in blocks for n in (block + 1, block + PAST) if n <= (in_windows or n)), room)
        longer = _cut((CHUNK + 1, CHUNK + PAST, *edges((LONG_CHUNK, FRAME_ROWS) if on_card else (LONG_CHUNK,))), room)
        return cls(_cut(one_each, room), at_edges, tails, longer, script, whole, in_windows)

    @property
    def longest_usual(self) -> int:
        """The longest prompt that every arm reads one like."""
        return max(self.classes)

    @classmethod
    def fixed(cls, script: Script) -> LengthPlan:
        """Every arm reads the script's prompts."""
        lengths = script.prompt_lengths
        return cls(lengths, lengths, lengths, lengths, script)

    def script_of(self, plays: Plays, *, long_chunks: bool = False) -> Script:
        """What an arm that ``plays`` these lengths reads. ``long_chunks``: its chunks are longer than ``CHUNK``."""
        if self.script.prompt_lengths:
            return self.script
        lengths = {"classes": self.classes, "edges": self.edges, "tails": self.tails, "chunks": self.chunks}[plays]
        if self.whole:
            lengths = tuple(sorted({*self.classes, *self.edges, *(self.chunks if long_chunks else ())}))
            if plays == "tails" and self.in_windows is not None:
                lengths = tuple(length for length in lengths if length <= self.in_windows)
        return dataclasses.replace(self.script, prompt_lengths=lengths)


def _cut(lengths: Iterable[int], room: int) -> tuple[int, ...]:
    return tuple(sorted({min(length, room) for length in lengths}))
