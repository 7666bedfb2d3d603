"""Decode rounds on a card: recorded once a window size, replayed as one graph, each answered by the conductor.

Lives in ``engine`` because a round is where model, state and experts meet; it knows the card only as a ``Machine`` and
a ``Backend``. Python writes the round's inputs, launches, waits once, and reads how it ended. A round that was given up
has committed nothing and can be repeated; its request ends with a named error.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from strata.engine.device_prompt import ChunkReader, DevicePrompt
from strata.engine.hand_over import HandedOver
from strata.engine.mailbox_check import PROBE_LIMIT_MS, MailboxCheck, check_mailbox, probe_launches
from strata.errors import EngineError
from strata.kernels.cuda.copies import COPY_IN
from strata.kernels.cuda.expert_step import ExpertStep, RoundMemory
from strata.kernels.cuda.mailbox import INPUT_WORDS, Mailbox
from strata.kernels.cuda.ops import CudaOps
from strata.kernels.cuda.program import (
    MAX_WINDOW,
    Launch,
    Machine,
    Program,
    ProgramMemory,
    RoundInputs,
    Runnable,
)
from strata.kernels.cuda.prompt.frame import SHORT_ROWS
from strata.kvcache.device_state import DeviceState
from strata.stages import Stages

if TYPE_CHECKING:
    from strata.engine.cancellation import Cancellation
    from strata.experts.device_dispatch import DeviceDispatch
    from strata.experts.system import ExpertSystem
    from strata.kernels.backend import Backend
    from strata.kvcache.attention_cache import KvFormat
    from strata.models.family import LogitRows, Model
    from strata.quant.layout import ExpertLayout

__all__ = ["Answer", "DeviceRounds", "DeviceSequence", "RoundGivenUp"]

logger = logging.getLogger(__name__)

ROUND_LIMIT_MS = 1000  # a display driver kills what takes two seconds
FILE_ROUND_LIMIT_MS = 20_000  # rounds whose experts are read from a file: not for a card that drives a display
_BY_DEADLINE = 2
_COPY_THREADS = 256
_WORDS = struct.Struct(f"{6 + MAX_WINDOW}i")  # ticket, limit, position, accepted rows, turn, ids, ticket
_NO_IDS = (0,) * MAX_WINDOW

Answer = Literal["logits", "best", "none"]
"""What a round writes to RAM of its rows: all logits and the best ids, the best ids, or neither."""


class RoundGivenUp(EngineError):  # noqa: N818 - what happened to a round
    """A round ended without an answer. Nothing of it was committed."""


@dataclass(frozen=True, eq=False)
class _Round:
    """A recorded window. ``early`` are the launches before the first that reads what the host gathers, if any do: they
    run while it gathers."""

    launches: list[Launch]
    early: Runnable | None
    rest: Runnable
    program: Program


class DeviceRounds:
    """Owns programs, mailbox and state on the card. Serves one sequence at a time (``new_sequence``). Close once: a
    sequence, or a session, that outlives it holds none of its memory."""

    def __init__(
        self,
        model: Model,
        experts: ExpertSystem,
        layout: ExpertLayout,
        machine: Machine,
        backend: Backend,
        max_context: int,
        kv: KvFormat,
        *,
        by_hand: bool = False,
        stages: Stages | None = None,
        chunk_rows: int | None = None,
        even_chunks: bool = False,
    ) -> None:
        """``chunk_rows``: of a prompt's chunks, at most where they are ``even_chunks``; None: prompts run as windows.
        ``by_hand``: the host hands each layer's CPU part over, without asking whether the mailbox works. ``stages`` of
        the load that these are a part of."""
        config, device = model.config, machine.device
        self._model, self._experts, self._layout, self._machine = model, experts, layout, machine
        self._top_k, self._vocabulary = config.top_k, config.vocabulary
        self._by_hand = by_hand
        self._stages = stages or Stages()
        self.mailbox_check: MailboxCheck | None = None
        self._ticket = 0
        self._rounds: dict[tuple[int, Answer], _Round] = {}
        self._current: DeviceSequence | None = None
        whole = torch.zeros(INPUT_WORDS, dtype=torch.int32, device=device)
        self._words, self._ticket_word = whole, whole[MAX_WINDOW + 3 :]
        self._inputs = RoundInputs(whole[3 : MAX_WINDOW + 3], whole[:1], whole[1:2], whole[2:3])
        self._memory = RoundMemory.on(device)
        self._buffers = ProgramMemory(device)
        self._backend = backend
        self._owned = ExitStack()
        with ExitStack() as owned:
            self._mailbox = Mailbox(backend, config.hidden, config.top_k, config.vocabulary, INPUT_WORDS)
            owned.callback(self._mailbox.close)
            self._logits_WV = torch.from_numpy(self._mailbox.logits)
            self.state = DeviceState(model.new_state(max_context, kv), self._inputs, self._take_pinned)
            names = ("box", "x", "tasks", "rows", "slots", "out", "flags")
            self.dispatch: DeviceDispatch = experts.serve_device(
                layout, device, {name: self._mailbox.host(name) for name in names}, MAX_WINDOW,
                MAX_WINDOW * config.top_k,
            )  # fmt: skip
            owned.callback(self.dispatch.close)
            self._exchanges = len(self.dispatch.tables.where)  # of a round at most: numbers are never used twice
            self.reader: DevicePrompt | None = None
            if chunk_rows is not None:
                scales = self.dispatch.tables.scales
                self.reader = DevicePrompt(
                    model, experts, layout, machine, backend, self.state, scales, chunk_rows, even=even_chunks
                )
            self._owned.push(owned.pop_all())
        self.limit_ms = FILE_ROUND_LIMIT_MS if self.dispatch.reads_files else ROUND_LIMIT_MS
        if self.dispatch.reads_files:
            logger.warning(
                "experts are read from the file inside a round: on a card that drives a display use --mmap-experts"
            )

    def prepare(self, windows: Sequence[int] = (1, MAX_WINDOW)) -> None:
        """Tests the mailbox, then records, loads and captures these window sizes, so that no round waits for it."""
        if self.mailbox_check is None and not self._by_hand:
            with self._stages.of("test of the mailbox"):
                self.mailbox_check = self._check_mailbox()
        with self._stages.of("rounds recorded"):
            for rows in sorted(windows, reverse=True):
                self._round(rows, "logits")
            if 1 in windows:
                self._round(1, "best")
            if MAX_WINDOW in windows:
                self._round(MAX_WINDOW, "none")

    def new_sequence(self) -> DeviceSequence:
        """An empty sequence; the one before, if any, is not alive any more."""
        if self._current is not None:
            self._current.alive = False
        self._settle()
        self.state.reset()
        self._settle()
        self._current = DeviceSequence(self)
        return self._current

    @contextmanager
    def reading(self, ids: Sequence[int]) -> Iterator[ChunkReader | None]:
        """What reads a prompt of these rows in chunks; None where it runs as windows: it is short, or there is none."""
        if self.reader is None or len(ids) <= SHORT_ROWS:
            yield None
            return
        if self.state.accepted:
            self.run(ids[:1], "none")  # which folds them; its own row is forgotten
            self.state.commit(0)
        self._settle()
        with self.reader.reading(len(ids)) as reader:
            yield reader
        self._settle()

    def pretend(self, length: int) -> None:
        """Fills the state as ``SequenceState.pretend`` says."""
        self._settle()
        self.state.pretend(length)
        self._settle()

    def run(self, ids: Sequence[int], answer: Answer) -> torch.Tensor | None:
        """One round of up to ``MAX_WINDOW`` rows. Raises ``RoundGivenUp``.

        With ``logits``: FP32 logits of its rows in memory that the next round overwrites. ``best_ids`` has the rest.
        """
        chosen = self._round(len(ids), answer)
        self._write_inputs(ids)
        if self.dispatch.refresh():
            self._settle()
        conductor = self.dispatch.conductor
        conductor.begin()
        failure: EngineError | None = None
        try:
            self._replay(chosen, ids)
        finally:
            self.state.folded()
            try:
                conductor.end()
            except EngineError as error:
                failure = error
        self._check_end(failure)
        return self._logits_WV[: len(ids)] if answer == "logits" else None

    def _check_mailbox(self) -> MailboxCheck:
        program = Program(self._machine.device, self._machine.multiprocessors, memory=self._buffers)
        probes = probe_launches(program, self._mailbox, self._memory, self._exchanges, self._layout.hidden)
        self._record_begin(program)
        launches = program.take() + probes
        self._record_end(program, None, 1, None, "none")
        launches += program.take()
        found = check_mailbox(
            self._machine, launches, self._mailbox, self.dispatch.conductor,
            lambda: self._write_words((0, 0, 0), [0], PROBE_LIMIT_MS), self._exchanges,
        )  # fmt: skip
        if found.microseconds is None:
            self._by_hand = True
            logger.warning(
                "the mailbox between card and CPU does not work here (%s): the host hands over the CPU's part of each "
                "layer between two graphs, which is slower", found.reason,
            )  # fmt: skip
        else:
            logger.info("mailbox: %.1f us an exchange", found.microseconds)
        return found

    def _replay(self, chosen: _Round, ids: Sequence[int]) -> None:
        """Runs a round to its end, even where rows cannot be gathered: half a round would fold half of the state."""
        if chosen.early is not None:
            chosen.early.run()
        try:
            self.state.gather(ids)
        finally:
            chosen.rest.run()
            self._machine.synchronize()

    def best_ids(self, rows: int) -> list[int]:
        """The lowest id among the largest logits of each row of the last round that has them; -1 where a logit is NaN
        or the largest is not finite."""
        best: list[int] = self._mailbox.best[:rows].tolist()
        return best

    @property
    def buffer_bytes(self) -> int:
        """Device memory of recorded rounds beside weights, experts and the sequence's own state."""
        zeroed = sum(one.program.zeroed_bytes for one in self._rounds.values())
        return self._buffers.nbytes + zeroed + self.state.record_bytes

    def describe(self) -> dict[str, int]:
        """Launches of the recorded rounds by window size, and of their layers."""
        return {f"{rows} rows, {answer}": len(r.launches) for (rows, answer), r in sorted(self._rounds.items())}

    def launches(self, rows: int) -> list[Launch]:
        """Of a round with logits, for a profile."""
        return self._round(rows, "logits").launches

    def time_launches(self, ids: Sequence[int], answer: Answer = "logits") -> list[tuple[str, float]]:
        """A round with a mark between each two launches: (kernel, seconds). It is not to be committed.

        Raises ``RoundGivenUp``.
        """
        chosen = self._round(len(ids), answer)
        if self._by_hand:
            raise EngineError("launches of rounds that the host hands over are not timed", "see STRATA_MAILBOX")
        self._write_inputs(ids)
        self.state.gather(ids)
        if self.dispatch.refresh():
            self._settle()
        failure: EngineError | None = None
        self.dispatch.conductor.begin()
        try:
            timed = self._machine.run_timed(chosen.launches)
        finally:
            self.state.folded()
            try:
                self.dispatch.conductor.end()
            except EngineError as error:
                failure = error
        self._check_end(failure)
        return [(one.kernel, one.microseconds / 1e6) for one in timed]

    def close(self) -> None:
        if self._current is not None:
            self._current.alive = False
        self._machine.synchronize()
        self._rounds.clear()
        self._owned.close()
        # All that holds tensors on the card, or memory that is not there any more.
        del self.state, self.dispatch, self._model, self._experts, self._mailbox, self._logits_WV, self.reader
        del self._words, self._ticket_word, self._inputs, self._memory, self._buffers

    def _take_pinned(self, nbytes: int) -> tuple[int, int]:
        """(host address, device address) of page-locked memory that lives as long as this."""
        buffer, registration = self._backend.allocate_pinned(nbytes)
        self._owned.callback(buffer.free)
        self._owned.callback(registration.unregister)
        return buffer.address, registration.alias(buffer.address)

    def _write_inputs(self, ids: Sequence[int]) -> None:
        self.state.begin(ids)
        state = self.state
        self._write_words((state.length, state.accepted, state.turn), ids, self.limit_ms)

    def _write_words(self, where: tuple[int, int, int], ids: Sequence[int], limit_ms: int) -> None:
        self._ticket = ticket = self._ticket % 0x3FFFFF + 1
        _WORDS.pack_into(
            self._mailbox.inputs.data, 0, ticket, limit_ms * 1000, *where, *ids, *_NO_IDS[len(ids) :], ticket
        )

    def _settle(self) -> None:
        """Waits for the rounds' stream and for torch's own, which fills tensors between rounds."""
        self._machine.synchronize()
        if self._machine.device.type == "cuda":
            torch.cuda.synchronize(self._machine.device)

    def _check_end(self, failure: EngineError | None) -> None:
        box = self._mailbox.box
        if failure is not None:
            raise RoundGivenUp(str(failure)) from failure
        if box.ended != self._ticket:
            raise EngineError(f"round {self._ticket} did not reach its end", "see the driver's log")
        if box.aborted:
            why = f"no answer within {self.limit_ms} ms" if box.aborted == _BY_DEADLINE else "it was stopped"
            raise RoundGivenUp(
                f"the CPU's part of layer {box.aborted_layer} did not come: {why}", "send the request again"
            )

    def _round(self, rows: int, answer: Answer) -> _Round:
        key = (rows, answer)
        if key not in self._rounds:
            self._rounds[key] = self._record(rows, answer)
        return self._rounds[key]

    def _record(self, rows: int, answer: Answer) -> _Round:
        machine = self._machine
        program = Program(machine.device, machine.multiprocessors, memory=self._buffers)
        state = self.state.record(program, rows)
        ops = CudaOps(program, self._inputs, cache_bytes=machine.cache_bytes)
        step = ExpertStep(ops, self._layout, self.dispatch.tables, self._memory, self._mailbox, rows, self._top_k)
        wanted: LogitRows = "none" if answer == "none" else "all"
        logits_TV = self._model.forward(ops, [0] * rows, state, step, wanted)
        self._record_end(program, ops, rows, logits_TV, answer)
        launches = program.take()
        assert step.exchanges <= self._exchanges, "a layer of experts that no table knows"
        self._record_begin(program)
        launches = program.take() + launches
        self._settle()  # what recording has filled is there before the first round
        if self._by_hand:
            by_hand = HandedOver(machine, launches, self.dispatch.conductor, lambda: self.limit_ms)
            return _Round(launches, None, by_hand, program)
        first = next((at for at, launch in enumerate(launches) if launch.kernel == COPY_IN), 0)
        early = machine.prepare(launches[:first]) if first else None
        return _Round(launches, early, machine.prepare(launches[first:]), program)

    def _record_begin(self, program: Program) -> None:
        program.launch(
            "round.begin", (1,), 32, self._mailbox.device("inputs"), self._words, self._words.numel(),
            self._memory.state, self._exchanges, self._memory.flags, MAX_WINDOW,
        )  # fmt: skip

    def _record_end(
        self, program: Program, ops: CudaOps | None, rows: int, logits_TV: torch.Tensor | None, answer: Answer
    ) -> None:
        mail, memory = self._mailbox, self._memory
        columns = 0 if logits_TV is None else logits_TV.shape[1]
        values = rows * columns if answer == "logits" else 0
        best = self._words if logits_TV is None or ops is None else ops.argmax_rows(logits_TV)
        logits = memory.state if logits_TV is None else logits_TV
        program.launch(
            "round.publish", (max(1, min(64, values // 4096)),), _COPY_THREADS,
            logits, mail.device("logits"), columns, values, best, mail.device("best"), memory.flags,
            mail.device("row_flags"), rows, self._ticket_word, memory.state, mail.device("box"),
        )  # fmt: skip


class DeviceSequence:
    """``TokenSequence`` of rounds on a card. A prompt runs as windows; its last one gives the logits."""

    lends = True

    def __init__(self, rounds: DeviceRounds) -> None:
        self.alive = True
        self._rounds = rounds
        self._before_last = 0
        self._reader: ChunkReader | None = None

    @property
    def chunk_rows(self) -> int | None:
        """Of the prompt that is being read, where the device chose them."""
        return None if self._reader is None else self._reader.chunk_rows

    @contextmanager
    def prompt(self, ids: Sequence[int]) -> Iterator[None]:
        self._check()
        with self._rounds.reading(ids) as self._reader:
            try:
                yield
            finally:
                self._reader = None

    def forward(
        self, ids: Sequence[int], logits: LogitRows, cancellation: Cancellation | None, *, certain: bool
    ) -> torch.Tensor | None:
        self._check()
        if self._reader is not None and certain:
            return self._reader.read(ids, logits, cancellation)
        rounds, found = self._rounds, None
        windows = list(_windows(len(ids)))
        if len(windows) > 1 and not certain:
            raise EngineError(f"a window of {len(ids)} rows is wider than {MAX_WINDOW}", "use smaller windows")
        for number, (first, stop) in enumerate(windows):
            if cancellation is not None:
                cancellation.check()
            if number:
                rounds.state.commit(windows[number - 1][1] - windows[number - 1][0])
            last = number == len(windows) - 1
            found = rounds.run(ids[first:stop], "logits" if last and logits != "none" else "none")
        self._before_last = windows[-1][0]
        return found[-1:] if found is not None and logits == "last" else found

    def best_ids(self, ids: Sequence[int], cancellation: Cancellation | None) -> list[int]:
        self._check()
        if len(ids) > MAX_WINDOW:
            raise EngineError(f"a window of {len(ids)} rows is wider than {MAX_WINDOW}", "use smaller windows")
        if cancellation is not None:
            cancellation.check()
        self._rounds.run(ids, "best")
        self._before_last = 0
        return self._rounds.best_ids(len(ids))

    def commit(self, num_rows: int) -> None:
        """Of a prompt in windows, rows before the last one are committed already, of one in chunks all."""
        if self._reader is not None:
            return
        self._rounds.state.commit(num_rows - self._before_last)
        self._before_last = 0

    def reset(self) -> None:
        self._check()
        self._rounds.state.reset()

    def pretend(self, length: int) -> None:
        self._check()
        self._rounds.pretend(length)

    def _check(self) -> None:
        if not self.alive:
            raise EngineError("another sequence has taken this one's memory on the card", "start it again")


def _windows(count: int) -> list[tuple[int, int]]:
    """Cuts rows into windows of at most ``MAX_WINDOW``, a function of the count alone."""
    return [(first, min(first + MAX_WINDOW, count)) for first in range(0, count, MAX_WINDOW)]
