"""Brings experts to where they are wanted: straight by a device copy, or through staging buffers and the stager.

Lives in ``experts`` because the way depends on the tier: page-locked RAM is copied from where it lies (neighbours in
one run), pageable and mapped bytes are staged by native threads, file bytes are read into a staging buffer ahead of
their turn. A staging buffer is used again only after the event of its last copy. It must not decide what moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from strata.errors import CheckpointError
from strata.experts.injection import Witness
from strata.experts.source import ExpertSource
from strata.experts.store import ExpertStore
from strata.experts.tiers import Tier
from strata.kernels.backend import DeviceEvent, DeviceStream
from strata.kernels.cpu.stager import ReadFailure, Stager

__all__ = ["Move", "Mover", "MoverCounters", "StagingBuffers"]

_MAPPED, _PINNED = int(Tier.MAPPED), int(Tier.PINNED)  # looked at once an expert; an enumeration's name takes longer


class _State(Enum):
    WAITING = auto()  # for a staging buffer
    STAGING = auto()  # a stager thread fills the buffer
    COPYING = auto()  # the device copies
    UNLOADING = auto()  # a stager thread empties the buffer into pageable RAM
    DONE = auto()
    FAILED = auto()  # the read did not bring the bytes; whoever waits for the move is told


@dataclass(eq=False)
class Move:
    """One expert on its way. ``address`` is where its bytes will be; valid once the move is done."""

    expert: int
    address: int
    source: int = 0  # device address of a move out of a slot; 0 for moves in
    state: _State = _State.WAITING
    buffer: int = -1
    ticket: int = 0
    event: DeviceEvent | None = None
    error: CheckpointError | None = None
    stays: bool = False  # the bytes stay in the staging buffer until ``release``


@dataclass
class MoverCounters:
    """Bytes and counts since the start; the mover alone writes them."""

    direct_bytes: int = 0
    direct_runs: int = 0
    staged_bytes: int = 0
    file_bytes: int = 0
    saved_bytes: int = 0
    buffer_waits: int = 0


class StagingBuffers:
    """Buffers of one expert each at ``addresses``, handed out in the order in which they become free."""

    def __init__(self, addresses: Sequence[int], injection: Witness | None = None) -> None:
        self.num_buffers = len(addresses)
        self._addresses = tuple(addresses)
        self._injection = injection
        self._free = deque(range(self.num_buffers))
        self._draining: deque[tuple[int, DeviceEvent]] = deque()
        self.num_waits = 0  # times that a buffer was wanted while the oldest copy still ran

    def address(self, buffer: int) -> int:
        return self._addresses[buffer]

    def acquire(self, *, block: bool) -> int | None:
        """A buffer that nothing reads any more; None when there is none and ``block`` is off, or none ever will be."""
        if self._free:
            return self._free.popleft()
        if not self._draining:
            return None
        buffer, event = self._draining[0]
        if not event.query():
            if self._injection is not None and self._injection.reuses_this_buffer():
                return buffer  # and it is still draining: the fault
            self.num_waits += 1
            if not block:
                return None
            event.synchronize()
        self._draining.popleft()
        return buffer

    def release(self, buffer: int, event: DeviceEvent | None = None) -> None:
        """The buffer may be used again after ``event``, or at once."""
        if event is None:
            self._free.append(buffer)
        else:
            self._draining.append((buffer, event))


class Mover:
    """See the module's page. One thread uses it. Every move that was started is waited for or ``drain``-ed."""

    def __init__(
        self, store: ExpertStore, source: ExpertSource, stager: Stager, stream: DeviceStream, buffers: StagingBuffers
    ) -> None:
        self.counters = MoverCounters()
        self.buffers = buffers
        self._store, self._source, self._stager, self._stream = store, source, stager, stream
        self._nbytes = source.blob_bytes
        self._waiting: deque[Move] = deque()
        self._staging: deque[Move] = deque()
        self._saving: deque[Move] = deque()  # moves out that hold a staging buffer
        self._reached: DeviceEvent | None = None  # the last event that was waited for

    @property
    def stream(self) -> DeviceStream:
        """Where its copies are enqueued."""
        return self._stream

    @contextmanager
    def staged_by(self, stager: Stager) -> Iterator[None]:
        """Other threads stage what is moved inside, all of which is waited for before the end."""
        own, self._stager = self._stager, stager
        try:
            yield
        finally:
            try:
                self.drain()
            except BaseException:  # interrupted again: closing waits for all of its jobs, whatever comes
                stager.close()
                self._staging.clear()
                self._saving.clear()
                raise
            finally:
                self._stager = own

    def load(self, experts: Sequence[int], targets: Sequence[int]) -> list[Move]:
        """Starts copies of experts into device memory at ``targets``, in order; page-locked neighbours in one run.

        Raises the named error of a mapped blob that is damaged, before any copy is started."""
        for expert in experts:
            self._check_mapped(expert)
        moves = [Move(expert, target) for expert, target in zip(experts, targets, strict=True)]
        first, direct = 0, []
        while first < len(moves):
            end = self._find_run(moves, first)
            if end > first:
                self._copy_run(moves[first:end])
                direct += moves[first:end]
                first = end
            else:
                self._waiting.append(moves[first])
                first += 1
        if direct:
            event = self._stream.record()  # one for all: a load asks for thousands, and each call takes the host's time
            for move in direct:
                move.event, move.state = event, _State.COPYING
        self.pump()
        return moves

    def fetch(self, expert: int) -> Move | None:
        """Starts reading an expert into a staging buffer where it stays; None when no buffer is free now."""
        buffer = self.buffers.acquire(block=False)
        if buffer is None:
            return None
        move = Move(expert, self.buffers.address(buffer), stays=True)
        self._start_staging(move, buffer)
        return move

    def save(self, expert: int, source: int, place: int) -> Move:
        """Starts copying an expert's bytes from device memory into a RAM place, which the caller owns."""
        move = Move(expert, self._store.place_address(place), source=source)
        if self._store.is_pinned(place):
            self._stream.copy(move.address, source, self._nbytes)
            move.event, move.state = self._stream.record(), _State.COPYING
            self.counters.saved_bytes += self._nbytes
        else:
            self._waiting.append(move)
        self.pump()
        return move

    def release(self, move: Move) -> None:
        """Gives back the staging buffer of a fetched move, waiting for it if need be; nothing may read it any more."""
        if move.stays:
            if move.state is _State.STAGING:
                with suppress(ReadFailure):
                    self._stager.wait(move.ticket)
                move.state = _State.DONE
            self.buffers.release(move.buffer)
            move.stays = False

    def has_ended(self, move: Move) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        self.pump()
        return self._advance(move, block=False)

    def wait(self, move: Move) -> None:
        """Blocks until the move is complete. Raises the named error of a copy or read that failed."""
        while not self._advance(move, block=True):
            self.pump(block=True)
        if move.error is not None:
            raise move.error

    def enqueued(self, move: Move) -> DeviceEvent:
        """Waits until the move's copy into device memory is enqueued; its event. Raises the named error of a read that
        failed."""
        while not self._advance(move, block=True, until=_State.COPYING):
            self.pump(block=True)
        if move.error is not None:
            raise move.error
        assert move.event is not None
        return move.event

    def pump(self, *, block: bool = False) -> None:
        """Hands filled buffers to the device and empty ones to the stager. With ``block`` at least one step is made."""
        while self._staging and self._advance(self._staging[0], block=block, until=_State.COPYING):
            self._staging.popleft()
            block = False
        while self._saving and self._advance(self._saving[0], block=block):
            self._saving.popleft()
            block = False
        while self._waiting:
            buffer = self.buffers.acquire(block=block)
            if buffer is None:
                assert not block, "every staging buffer is held and none is on its way back"
                return
            block = False
            self._start(self._waiting.popleft(), buffer)

    def drain(self) -> None:
        """Waits for everything under way, whatever becomes of it; nothing writes to any memory afterwards."""
        self._waiting.clear()
        for move in (*self._staging, *self._saving):
            with suppress(ReadFailure):
                self._stager.wait(move.ticket)
        self._staging.clear()
        self._saving.clear()

    def _start(self, move: Move, buffer: int) -> None:
        if not move.source:
            self._start_staging(move, buffer)
            return
        move.buffer = buffer
        self._stream.copy(self.buffers.address(buffer), move.source, self._nbytes)
        move.event, move.state = self._stream.record(), _State.COPYING
        self._saving.append(move)
        self.counters.saved_bytes += self._nbytes

    def _check_mapped(self, expert: int) -> None:
        if self._store.host_tier[expert] == _MAPPED:
            layer, number = divmod(expert, self._store.num_experts)
            self._source.check_mapped(layer, number, int(self._store.host_address[expert]))

    def _start_staging(self, move: Move, buffer: int) -> None:
        move.buffer = buffer
        target = self.buffers.address(buffer)
        address = int(self._store.host_address[move.expert])
        if address:
            move.ticket = self._stager.copy(target, address, self._nbytes)
            self.counters.staged_bytes += self._nbytes
        else:
            move.ticket = self._source.submit(self._stager, *divmod(move.expert, self._store.num_experts), target)
            self.counters.file_bytes += self._nbytes
        move.state = _State.STAGING
        if not move.stays:
            self._staging.append(move)

    def _advance(self, move: Move, *, block: bool, until: _State = _State.DONE) -> bool:
        """Moves on as far as possible without (or with) waiting; True once ``until`` is reached or never will be."""
        if move.state is _State.STAGING and self._settle_ticket(move, block):
            if move.stays:
                move.state = _State.DONE
            else:
                self._stream.copy(move.address, self.buffers.address(move.buffer), self._nbytes)
                move.event, move.state = self._stream.record(), _State.COPYING
                self.buffers.release(move.buffer, move.event)
        if until is _State.COPYING:
            return move.state in (_State.COPYING, _State.DONE, _State.FAILED)
        if move.state is _State.COPYING:
            assert move.event is not None
            if block and move.event is not self._reached:
                move.event.synchronize()
            if block or move.event.query():
                self._reached = move.event
                self._finish_copy(move)
        if move.state is _State.UNLOADING and self._settle_ticket(move, block):
            self.buffers.release(move.buffer)
            move.state = _State.DONE
        return move.state in (_State.DONE, _State.FAILED)

    def _finish_copy(self, move: Move) -> None:
        if move.source and move.buffer >= 0:  # the device has filled the buffer; a thread empties it into RAM
            move.ticket = self._stager.copy(move.address, self.buffers.address(move.buffer), self._nbytes)
            move.state = _State.UNLOADING
        else:
            move.state = _State.DONE

    def _settle_ticket(self, move: Move, block: bool) -> bool:
        """True once the stager is through with it; a failed read frees the buffer and is kept for who waits."""
        try:
            if block:
                self._stager.wait(move.ticket)
                return True
            return self._stager.query(move.ticket)
        except ReadFailure as failure:
            move.error = self._source.explain(*divmod(move.expert, self._store.num_experts), failure)
            move.state, move.stays = _State.FAILED, False
            self.buffers.release(move.buffer)
            return False

    def _find_run(self, moves: list[Move], first: int) -> int:
        """End of the run of page-locked neighbours, in RAM and at the target alike; ``first`` when there is none."""
        end = first
        while end < len(moves):
            expert = moves[end].expert
            if self._store.host_tier[expert] != _PINNED:
                break
            if end > first and not self._are_neighbours(moves[end - 1], moves[end]):
                break
            end += 1
        return end

    def _are_neighbours(self, one: Move, two: Move) -> bool:
        addresses = self._store.host_address
        source_step = int(addresses[two.expert]) - int(addresses[one.expert])
        return source_step == two.address - one.address == self._nbytes

    def _copy_run(self, run: list[Move]) -> None:
        self._stream.copy(run[0].address, int(self._store.host_address[run[0].expert]), self._nbytes * len(run))
        self.counters.direct_bytes += self._nbytes * len(run)
        self.counters.direct_runs += 1
