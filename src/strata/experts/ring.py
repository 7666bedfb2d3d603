"""The ring of device slots that a prompt's experts stream through, this layer's and the next one's.

Lives in ``experts`` because it streams what the cache does not hold. Its slots are reserved for good or borrowed from
the cache (``lender``); either way they own no expert. Each expert is started once for a chunk and layer, in order, and
a slot is filled again only after the kernel has used what it held. It must not compute or count tiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from strata.errors import StrataError
from strata.experts.mover import Move, Mover

__all__ = ["PromptRing"]


class PromptRing:
    """Streams experts into ``addresses``. At most half of the ring is handed out at once, while the rest fills."""

    def __init__(self, mover: Mover, addresses: Sequence[int]) -> None:
        self._mover = mover
        self._free = sorted(addresses)
        self._moving: deque[Move] = deque()
        self._queue: deque[int] = deque()
        self._expected: set[int] = set()  # queued or moving
        self._batch = max(1, len(addresses) // 2)
        self.num_slots = len(addresses)
        self.num_loads = 0
        self.num_unused = 0

    def want(self, experts: Sequence[int]) -> None:
        """Queues experts (flat numbers) that will be asked for next, and starts what has room."""
        fresh = [expert for expert in experts if expert not in self._expected]
        self._queue.extend(fresh)
        self._expected.update(fresh)
        self._start()

    def take(self, experts: Sequence[int], before_last: Callable[[], None] | None = None) -> Iterator[list[Move]]:
        """Yields the experts in batches as they arrive; a batch's slots are filled again once the caller goes on.

        What an earlier ``want`` queued and this list lacks is dropped. ``before_last`` runs before the last batch is
        handed out, to ``want`` the next layer's.
        """
        left = set(experts)
        self._drop_unwanted(left)
        self.want(experts)
        while left:
            self._start()
            batch = self._collect(left)
            if not left and before_last is not None:
                before_last()
            try:
                yield batch
            finally:  # also when the caller fails
                self._give_back(batch)

    def settle(self) -> None:
        """Waits until nothing moves; drops what was queued. All slots are free afterwards."""
        self._queue.clear()
        self._expected.clear()
        while self._moving:
            self._drop(self._moving.popleft())

    def _collect(self, left: set[int]) -> list[Move]:
        """The next arrivals among ``left``, which loses them: waits for the first, then takes what is there."""
        batch: list[Move] = []
        assert self._moving, "what is asked for is on its way"
        while self._moving and len(batch) < self._batch:
            if batch and not self._mover.has_ended(self._moving[0]):
                break
            move = self._moving.popleft()
            self._expected.discard(move.expert)
            if move.expert not in left:
                self._drop(move)
                self._start()
                continue
            try:
                self._mover.wait(move)
            except StrataError:
                self._give_back([*batch, move])
                self.settle()  # what else is on its way belongs to a request that ends here
                raise
            left.discard(move.expert)
            batch.append(move)
        return batch

    def _drop(self, move: Move) -> None:
        """Waits for an expert that nobody asks for any more, and frees its slot."""
        with suppress(StrataError):
            self._mover.wait(move)
        self.num_unused += 1
        self._give_back([move])

    def _drop_unwanted(self, wanted: set[int]) -> None:
        dropped = {expert for expert in self._queue if expert not in wanted}
        self._queue = deque(expert for expert in self._queue if expert in wanted)
        self._expected -= dropped

    def _start(self) -> None:
        count = min(len(self._queue), len(self._free))
        if not count:
            return
        experts = [self._queue.popleft() for _ in range(count)]
        self._moving.extend(self._mover.load(experts, self._free[:count]))
        self.num_loads += count
        del self._free[:count]

    def _give_back(self, moves: list[Move]) -> None:
        if moves:
            self._free = sorted((*self._free, *(move.address for move in moves)))
