"""A sequence's state on a card as the passes of a prompt's chunk see it: they run in turns, each at its own position.

Lives in ``kvcache`` beside ``device_state``, whose memory it reads and writes between rounds. A pass is a whole frame
of rows of which only some are the chunk's: those alone reach caches, tails and history. Recurrent state advances as the
rows are computed; what was written belongs to the sequence once ``advance`` says so. It must not know models.

Legend: T rows of a frame, P positions, G key/value heads, D width, B blocks, J tokens of a block, U tail rows, C
channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from strata.kernels.ops import DeltaRows
from strata.kvcache.attention_cache import AttentionCache, IndexCache
from strata.kvcache.parts import GatherRows, RotaryTable
from strata.kvcache.recurrent_state import TokenHistory

__all__ = ["PassState", "PromptParts", "PromptTail"]


class PromptTail:
    """The last U inputs of a causal convolution before the next row."""

    def __init__(self, rows_UC: torch.Tensor) -> None:
        self.rows_UC = rows_UC

    def record(self, x_TC: torch.Tensor) -> None:
        """``x`` are the rows that were computed."""
        kept = self.rows_UC.shape[0]
        rows = x_TC if x_TC.shape[0] >= kept else torch.cat((self.rows_UC, x_TC))
        self.rows_UC = rows[rows.shape[0] - kept :].clone()


@dataclass(frozen=True, eq=False)
class PromptParts:
    """What passes share, by layer. Matrices and caches are borrowed."""

    attention: Mapping[int, AttentionCache]
    states: Mapping[int, torch.Tensor]
    tails: Mapping[int, PromptTail]
    histories: Mapping[int, TokenHistory]
    ngram_tails: Mapping[int, PromptTail]


class PassState:
    """``StateParts`` of one pass: a frame of ``rows`` rows from position ``start``, of which [first, stop) are new."""

    sequences = 1

    def __init__(self, parts: PromptParts, start: int, rows: int, first: int, stop: int) -> None:
        self._start, self._rows = start, rows
        new = slice(first, stop)
        self.attention = {layer: _PassCache(cache, start, rows, new) for layer, cache in parts.attention.items()}
        self.delta = {layer: _PassDelta(state, parts.tails[layer], new) for layer, state in parts.states.items()}
        self.ngram = {
            layer: _PassNgram(history, parts.ngram_tails[layer], new) for layer, history in parts.histories.items()
        }

    def begin(self, rows: int, *, certain: bool = False) -> int:
        assert certain, "rows of a prompt are certain"
        assert rows == self._rows, "a pass is a whole frame"
        return self._start

    def rotary(self, table: RotaryTable) -> RotaryTable:
        return table


class _PassCache:
    """See ``AttentionCache``; keys and values come back up to the frame's end."""

    def __init__(self, cache: AttentionCache, start: int, rows: int, new: slice) -> None:
        self.index = None if cache.index is None else _PassIndex(cache.index, start, rows, new)
        self._cache, self._end, self._new = cache, start + rows, new

    def append(self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache, new = self._cache, self._new
        for kept, rows in ((cache.k_PGD, k_TGD), (cache.v_PGD, v_TGD)):
            kept[start + new.start : start + new.stop] = rows[new]
        return _up_to(cache.k_PGD, self._end), _up_to(cache.v_PGD, self._end)


class _PassIndex:
    """See ``IndexCache``. A frame begins and ends with whole blocks; only blocks that are complete and hold a new row
    are stored."""

    selects_always = False

    def __init__(self, index: IndexCache, start: int, rows: int, new: slice) -> None:
        assert start % index.block == 0, "a frame begins with a block"
        assert rows % index.block == 0, "a frame ends with a block"
        self.block = index.block
        self._index, self._new, self._end = index, new, start + rows

    def append(self, start: int, raw_TD: torch.Tensor) -> tuple[range, torch.Tensor]:
        new, index = self._new, self._index
        index.raw_PD[start + new.start : start + new.stop] = raw_TD[new]
        raw = raw_TD
        if new.start:
            raw = torch.cat((index.raw_PD[start : start + new.start], raw_TD[new.start :]))
        return range(start, self._end, self.block), raw.view(-1, self.block, raw_TD.shape[1])

    def finish(self, start: int, rows: int, key_BD: torch.Tensor) -> tuple[int, torch.Tensor]:
        first, last = (start + self._new.start) // self.block, (start + self._new.stop) // self.block
        at = start // self.block
        self._index.key_BD[first:last] = key_BD[first - at : last - at]
        return self._end // self.block, self._index.key_BD[: self._end // self.block]


class _PassTail:
    """See ``ConvolutionTail``."""

    def __init__(self, tail: PromptTail, new: slice) -> None:
        self._tail, self._new = tail, new

    @property
    def rows_UC(self) -> torch.Tensor:
        return self._tail.rows_UC

    @rows_UC.setter
    def rows_UC(self, rows_UC: torch.Tensor) -> None:
        self._tail.rows_UC = rows_UC

    def record(self, x_TC: torch.Tensor, *, certain: bool) -> None:
        self._tail.record(x_TC[self._new])


class _PassDelta:
    """See ``DeltaState``."""

    pending: DeltaRows | None = None

    def __init__(self, state_NDV: torch.Tensor, tail: PromptTail, new: slice) -> None:
        self.state_NDV = state_NDV
        self.tail = _PassTail(tail, new)

    def record(self, qkv_TC: torch.Tensor, rows: DeltaRows, *, written: bool) -> None:
        assert written, "rows of a prompt are certain"
        self.tail.record(qkv_TC, certain=True)


class _PassNgram:
    """See ``NgramState``. Rows that are not new read as zeros."""

    def __init__(self, history: TokenHistory, tail: PromptTail, new: slice) -> None:
        self.tail = _PassTail(tail, new)
        self._history, self._new = history, new

    def embedded(self, gather: GatherRows, ids: Sequence[int], width: int) -> torch.Tensor:
        new, device = self._new, self.tail.rows_UC.device
        own = list(ids[new])
        found = gather(self._history.windows(own))
        self._history.record(own)
        self._history.commit(len(own))
        embedded = torch.zeros(len(ids), width, device=device)
        embedded[new] = found.to(device)
        return embedded


def _up_to(cache_PGD: torch.Tensor, end: int) -> torch.Tensor:
    """The first ``end`` positions, zeros where the cache is shorter."""
    if cache_PGD.shape[0] >= end:
        return cache_PGD[:end]
    whole = cache_PGD.new_zeros(end, *cache_PGD.shape[1:])
    whole[: cache_PGD.shape[0]] = cache_PGD
    return whole
