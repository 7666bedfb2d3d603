"""A sequence's state for rounds that are recorded once and run at any position (``kernels.cuda.program``).

Lives in ``kvcache`` because it has the parts of a ``SequenceState`` with their meaning, only that a part appends
launches where a ``SequenceState`` computes: the position and the number of accepted rows are read from device memory.
Rows of a window are recorded; the next round folds the accepted ones, so a round that was given up can be repeated:
whatever becomes of it, its fold has happened, and nothing else was committed. What is recorded has two copies that take
turns (``kernels.cuda.records``): every round that has run has moved on the one that it read to the one that it wrote.
It must not know models.

Legend: T rows, W rows of the widest window, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from strata.errors import RequestError
from strata.kernels.cuda.cache_rows import IndexRows, KeyValueRows
from strata.kernels.cuda.copies import floats_at, record_copy_in
from strata.kernels.cuda.program import MAX_WINDOW, Address, Program, RoundInputs
from strata.kernels.cuda.records import DeltaRecord, TailRecord
from strata.kernels.cuda.rotary import RecordedRotary
from strata.kernels.ops import DeltaRows
from strata.kvcache.attention_cache import AttentionCache, IndexCache
from strata.kvcache.parts import GatherRows, RotaryTable
from strata.kvcache.prompt_state import PromptParts, PromptTail
from strata.kvcache.recurrent_state import ConvolutionTail
from strata.kvcache.sequence_state import SequenceState

__all__ = ["DeviceState", "RecordedState"]

TakePinned = Callable[[int], tuple[int, int]]
"""From bytes to (host address, device address) of page-locked memory."""


class _NgramRows:
    """What the n-gram table says of a round's tokens: written by the host, copied when the block begins."""

    def __init__(self, gather: GatherRows, width: int, device: torch.device, take_pinned: TakePinned) -> None:
        self._gather = gather
        address, self._alias = take_pinned(MAX_WINDOW * width * 4)
        host_WD = floats_at(address, MAX_WINDOW, width)
        self._host = [host_WD[:rows] for rows in range(MAX_WINDOW + 1)]
        self.device_WD = torch.zeros(MAX_WINDOW, width, device=device)

    def write(self, windows: list[list[int]], rows: int) -> None:
        self._gather(windows, self._host[rows])

    def record(self, program: Program, rows: int) -> torch.Tensor:
        record_copy_in(program, Address(self._alias), self.device_WD[:rows])
        return self.device_WD[:rows]


class DeviceState:
    """Owns a ``SequenceState``'s tensors on the device for one sequence at a time; ``record`` gives a program its view.

    ``length`` counts committed positions, ``accepted`` the rows of the last round that the next one folds; ``turn`` is
    the copy of the records that the last round has written.
    """

    def __init__(self, state: SequenceState, inputs: RoundInputs, take_pinned: TakePinned) -> None:
        self.max_positions = state.max_positions
        self.length = 0
        self.accepted = 0
        self.turn = 0
        self._state = state
        self._inputs = inputs
        self._take_pinned = take_pinned
        self._recorded = 0
        self._deltas = {
            layer: DeltaRecord.zeros(_take_tail(delta.tail), delta.state_NDV) for layer, delta in state.delta.items()
        }
        self._ngram_tails = {layer: _take_tail(ngram.tail) for layer, ngram in state.ngram.items()}
        self._ngram_rows: dict[int, _NgramRows] = {}
        self._rotary: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tails = [*self._ngram_tails.values(), *(delta.tail for delta in self._deltas.values())]

    def record(self, program: Program, rows: int) -> RecordedState:
        """The state as a forward of ``rows`` rows sees it."""
        state = self._state
        program.tails.update((tail.stand_in_UC.data_ptr(), tail) for tail in self._tails)
        program.deltas.update((state.delta[layer].state_NDV.data_ptr(), one) for layer, one in self._deltas.items())
        return RecordedState(
            {layer: _RecordedCache(program, cache) for layer, cache in state.attention.items()},
            {
                layer: _RecordedDelta(program, state.delta[layer].state_NDV, record.tail)
                for layer, record in self._deltas.items()
            },
            {
                layer: _RecordedNgram(program, tail, partial(self._rows_of, layer))
                for layer, tail in self._ngram_tails.items()
            },
            partial(self._whole_rotary, program),
        )

    def check_room(self, rows: int) -> None:
        """Raises ``RequestError`` when the rows do not fit."""
        if rows < 1 or self.length + rows > self.max_positions:
            raise RequestError(
                f"{rows} rows at position {self.length} do not fit a context of {self.max_positions} positions",
                "shorten the prompt or raise --max-context",
            )

    def begin(self, ids: Sequence[int]) -> None:
        """Starts a round of ``ids``."""
        self.check_room(len(ids))
        self._recorded = len(ids)

    def gather(self, ids: Sequence[int]) -> None:
        """Puts what the n-gram tables say of a round's ids where its ``COPY_IN`` reads it.

        Raises ``CheckpointError`` for a damaged row.
        """
        for layer, rows in self._ngram_rows.items():
            history = self._state.ngram[layer].history
            rows.write(history.windows(ids), len(ids))
            history.record(ids)

    def folded(self) -> None:
        """The round has run to its end, for good or not: what was accepted before is part of the state now."""
        self.accepted = 0
        self.turn = 1 - self.turn

    def commit(self, accepted: int) -> None:
        """Accepts the first rows of the last round and forgets the others."""
        assert 0 <= accepted <= self._recorded, (accepted, self._recorded)
        for ngram in self._state.ngram.values():
            ngram.history.commit(accepted)
        self.length += accepted
        self.accepted = accepted
        self._recorded = 0

    def begin_prompt(self) -> PromptParts:
        """What the passes of a prompt read and write; no accepted row may wait to be folded, and no round may run until
        ``end_prompt``."""
        assert not self.accepted, "accepted rows are folded first"
        state = self._state

        def tail_of(tail: TailRecord) -> PromptTail:
            return PromptTail(tail.rows_SRC[self.turn, : tail.stand_in_UC.shape[0]].clone())

        return PromptParts(
            state.attention,
            {layer: delta.state_NDV for layer, delta in state.delta.items()},
            {layer: tail_of(record.tail) for layer, record in self._deltas.items()},
            {layer: ngram.history for layer, ngram in state.ngram.items()},
            {layer: tail_of(tail) for layer, tail in self._ngram_tails.items()},
        )

    def advance(self, rows: int) -> None:
        """A prompt's next rows are part of the sequence."""
        self.length += rows

    def end_prompt(self, parts: PromptParts) -> None:
        """Rounds go on after the rows that ``advance`` told of."""
        for layer, tail in (*parts.tails.items(), *parts.ngram_tails.items()):
            record = self._deltas[layer].tail if parts.tails.get(layer) is tail else self._ngram_tails[layer]
            record.rows_SRC[self.turn, : tail.rows_UC.shape[0]] = tail.rows_UC

    def pretend(self, length: int) -> None:
        """See ``SequenceState``; the card must be idle."""
        self.reset()
        self._state.pretend(length)
        self.length = length

    def reset(self) -> None:
        """An empty sequence. Keys and values of before lie behind its length and are never read."""
        self.length = self.accepted = self._recorded = 0
        for delta in self._state.delta.values():
            delta.state_NDV.zero_()
        for tail in self._tails:
            tail.rows_SRC.zero_()
        for ngram in self._state.ngram.values():
            ngram.history.clear()

    @property
    def record_bytes(self) -> int:
        """Of ``nbytes``, what a ``SequenceState`` does not have."""
        return self.nbytes - self._state.nbytes

    @property
    def nbytes(self) -> int:
        others = [
            *(tail.rows_SRC for tail in self._tails),
            *(rows.device_WD for rows in self._ngram_rows.values()),
            *(t for pair in self._rotary.values() for t in pair),
        ]
        counted = sum(tail.stand_in_UC.nbytes for tail in self._tails)  # by the sequence state
        records = sum(delta.nbytes for delta in self._deltas.values())
        return int(self._state.nbytes - counted + records + sum(t.nbytes for t in others))

    def _rows_of(self, layer: int, gather: GatherRows, width: int) -> _NgramRows:
        if layer not in self._ngram_rows:
            self._ngram_rows[layer] = _NgramRows(gather, width, self._inputs.ids.device, self._take_pinned)
        return self._ngram_rows[layer]

    def _whole_rotary(self, program: Program, table: RotaryTable) -> RotaryTable:
        if id(table) not in self._rotary:
            cos_PR, sin_PR = table.rows(0, self.max_positions)
            self._rotary[id(table)] = (cos_PR.contiguous(), sin_PR.contiguous())
        return RecordedRotary(program, self._inputs, *self._rotary[id(table)])


@dataclass(frozen=True, eq=False)
class RecordedState:
    """``StateParts`` of one program. A forward starts at position 0 for the host: nobody looks at it."""

    attention: Mapping[int, _RecordedCache]
    delta: Mapping[int, _RecordedDelta]
    ngram: Mapping[int, _RecordedNgram]
    rotary_of: Callable[[RotaryTable], RotaryTable]
    sequences: int = 1

    def begin(self, rows: int, *, certain: bool = False) -> int:
        assert not certain, "a recorded round is a window"
        return 0

    def rotary(self, table: RotaryTable) -> RotaryTable:
        return self.rotary_of(table)


class _RecordedIndex:
    """See ``IndexCache``: keys come raw, and the blocks that these rows may complete are looked at every time. The
    launch of the operations between ``append`` and ``finish`` writes the caches (``kernels.cuda.cache_rows``)."""

    selects_always = True

    def __init__(self, program: Program, index: IndexCache) -> None:
        self.block = index.block
        self._program, self._index = program, index

    def append(self, start: int, raw_TD: torch.Tensor) -> tuple[range, torch.Tensor]:
        rows, width = raw_TD.shape
        candidates = (rows + self.block - 1) // self.block
        stand_in_BJD = self._program.empty(candidates, self.block, width)
        self._program.indexed[stand_in_BJD.data_ptr()] = IndexRows(raw_TD, self._index.raw_PD, self._index.key_BD)
        return range(0, candidates * self.block, self.block), stand_in_BJD

    def finish(self, start: int, rows: int, key_BD: torch.Tensor) -> tuple[int, torch.Tensor]:
        assert not self._program.indexed, "the keys of these blocks are nobody's"
        return self._index.key_BD.shape[0], self._index.key_BD


class _RecordedCache:
    """See ``AttentionCache``; what ``append`` returns is the whole cache, written before it is attended."""

    def __init__(self, program: Program, cache: AttentionCache) -> None:
        self.index = None if cache.index is None else _RecordedIndex(program, cache.index)
        self._program, self._cache = program, cache

    def append(self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache.k_PGD, self._cache.v_PGD
        self._program.appended.append(KeyValueRows(k_TGD, v_TGD, keys, values))
        return keys, values


class _RecordedTail:
    """See ``ConvolutionTail``; the convolution's launch records its rows."""

    def __init__(self, program: Program, tail: TailRecord) -> None:
        self.rows_UC = tail.stand_in_UC
        self._program = program

    def record(self, x_TC: torch.Tensor, *, certain: bool) -> None:
        assert self._program.recorded.pop(self.rows_UC.data_ptr()) == x_TC.data_ptr(), "a launch has taken other rows"


class _RecordedDelta:
    """See ``DeltaState``. The step's launch folds and records rows itself."""

    def __init__(self, program: Program, state_NDV: torch.Tensor, tail: TailRecord) -> None:
        self.state_NDV = state_NDV
        self.pending: DeltaRows | None = None
        self.tail = _RecordedTail(program, tail)

    def record(self, qkv_TC: torch.Tensor, rows: DeltaRows, *, written: bool) -> None:
        self.tail.record(qkv_TC, certain=written)


class _RecordedNgram:
    """See ``NgramState``; the rows are gathered by the host before the round."""

    def __init__(self, program: Program, tail: TailRecord, rows_of: Callable[[GatherRows, int], _NgramRows]) -> None:
        self.tail = _RecordedTail(program, tail)
        self._program, self._rows_of = program, rows_of

    def embedded(self, gather: GatherRows, ids: Sequence[int], width: int) -> torch.Tensor:
        return self._rows_of(gather, width).record(self._program, len(ids))


def _take_tail(tail: ConvolutionTail) -> TailRecord:
    """A record in place of the tail's own memory."""
    tail_rows, channels = tail.rows_UC.shape
    record = TailRecord.zeros(tail_rows, channels, tail.rows_UC.device)
    tail.rows_UC = record.stand_in_UC
    return record
