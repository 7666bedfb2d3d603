"""Touching, page-locking and filling at once: who comes first, page by page, and what is left when any of them ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import EngineError
from strata.kernels.host import HostBackend, HostFaults, HostRegistration
from strata.memory import touching
from strata.memory.locked_memory import LockedMemory
from strata.memory.page_lock import take_memory
from strata.memory.requests import PinRequest
from strata.memory.system import system
from tests.patience import PATIENCE_S

PAGE = 4096
CAP = 64 << 20
LIMIT_S = PATIENCE_S


@dataclass
class Journal:
    """What happened to which bytes, in order; ends of touches and registrations, begins of writes."""

    events: list[tuple[str, int, int]] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, begin: int, nbytes: int) -> None:
        with self.guard:
            self.events.append((what, begin, begin + nbytes))

    def of(self, *names: str) -> list[tuple[int, tuple[str, int, int]]]:
        return [(when, one) for when, one in enumerate(self.events) if one[0] in names]


class Recorded(HostBackend):
    """Registrations in a journal; one of them may break the device. ``before`` runs first in each, with its number."""

    def __init__(
        self, journal: Journal, faults: HostFaults, broken_at: int | None = None, before: Callable[[int], Any] = int
    ) -> None:
        super().__init__(CAP, faults)
        self.journal, self.broken_at, self.before = journal, broken_at, before
        self.number = 0

    def register(self, address: int, nbytes: int) -> HostRegistration:
        number, self.number = self.number, self.number + 1
        self.before(number)
        if number == self.broken_at:
            raise EngineError("the device is gone")
        try:
            return super().register(address, nbytes)
        finally:
            self.journal.add("register", address, nbytes)


@contextmanager
def journal_of_touches(broken_at: int | None = None) -> Iterator[Journal]:
    journal = Journal()
    original = system.touch_pages

    def touch(address: int, nbytes: int) -> None:
        if broken_at is not None and len(journal.of("touch")) >= broken_at:
            raise OSError("no page")
        original(address, nbytes)
        journal.add("touch", address, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "touch_pages", touch)
        patch.setattr(touching, "PIECE_BYTES", 2 * PAGE)
        yield journal


def fill(memory: LockedMemory, journal: Journal, count: int) -> None:
    """As a load does it: place after place, a wait only where the last one does not reach."""
    allowed = 0
    for place in range(count):
        if place >= allowed:
            allowed = memory.wait_for(place)
        journal.add("write", memory.address + place * memory.stride, memory.stride)


def check_order(journal: Journal) -> None:
    """Every byte is touched before it is registered and registered before it is written; slices follow one another."""
    registered = [one for _, one in journal.of("register")]
    assert registered == sorted(registered)
    for when, (_, begin, end) in journal.of("register"):
        touched = [one for at, one in journal.of("touch") if at < when]
        assert sum(
            min(end, stop) - max(begin, start) for _, start, stop in touched if start < end and begin < stop
        ) == (end - begin)
    for when, (_, begin, end) in journal.of("write"):
        for _, (_, start, stop) in [one for one in journal.of("touch", "register") if one[0] > when]:
            assert stop <= begin or end <= start, "it was written too early"


def without_time(report: str) -> str:
    return report.rpartition(",")[0]


CASES = {
    "num_places": st.integers(2, 24),
    "stride": st.sampled_from([PAGE, 3 * PAGE, 1088, 5000]),
    "slice_places": st.integers(1, 5),
    "threads": st.integers(2, 3),
    "limit_pages": st.none() | st.integers(0, 40),
    "flags": st.none() | st.lists(st.booleans(), min_size=24, max_size=24),
    "refused_at": st.none() | st.integers(0, 6),
}


def take(backend: HostBackend, drawn: dict[str, Any], *, wait: bool) -> LockedMemory:
    flags, pages = drawn["flags"], drawn["limit_pages"]
    return take_memory(
        backend,
        drawn["num_places"],
        drawn["stride"],
        PinRequest(prefer_slices=True, touch_threads=drawn["threads"]),
        limit=None if pages is None else pages * PAGE,
        slice_bytes=drawn["slice_places"] * drawn["stride"],
        needed=None if flags is None else np.array(flags[: drawn["num_places"]]),
        wait=wait,
    )


@given(drawn=st.fixed_dictionaries(CASES))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_locked_beside_a_fill_it_is_what_it_is_locked_before(drawn: dict[str, Any]) -> None:
    faults = HostFaults(refuse_at_slice=drawn["refused_at"], poison_after_refusal=True)
    threads = threading.active_count()
    with journal_of_touches() as journal:
        before = take(Recorded(Journal(), faults), drawn, wait=True)
        first = len(journal.events)
        backend = Recorded(journal, faults)
        memory = take(backend, drawn, wait=False)
        fill(memory, journal, memory.num_places)
        memory.settle()
        del journal.events[:first]
        check_order(journal)
    assert ((memory.aliases != 0) == (before.aliases != 0)).all()
    assert [(part.offset, part.nbytes) for part in memory.slices] == [(p.offset, p.nbytes) for p in before.slices]
    assert (memory.path, without_time(memory.report)) == (before.path, without_time(before.report))
    assert memory.began < memory.ended
    assert threading.active_count() == threads
    before.close()
    memory.close()
    assert backend.statistics().pinned_bytes == 0


@given(
    drawn=st.fixed_dictionaries(CASES),
    broken_at=st.none() | st.integers(0, 6),
    untouched_from=st.none() | st.integers(0, 12),
    written=st.none() | st.integers(0, 24),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_ends_nothing_is_left(
    drawn: dict[str, Any], broken_at: int | None, untouched_from: int | None, written: int | None
) -> None:
    """A slice that breaks the device, a touch that fails, a fill that is given up (a read that failed, Ctrl-C)."""
    threads = threading.active_count()
    freed: list[int] = []
    with journal_of_touches(untouched_from) as journal, pytest.MonkeyPatch.context() as patch:
        free = system.Region.free
        patch.setattr(system.Region, "free", lambda region: (freed.append(region.address), free(region)))
        backend = Recorded(journal, HostFaults(refuse_at_slice=drawn["refused_at"]), broken_at)
        failed = False
        try:
            memory = take(backend, drawn, wait=False)
        except (EngineError, OSError):
            failed = True  # one slice alone is locked at once
        else:
            try:
                fill(memory, journal, memory.num_places if written is None else min(written, memory.num_places))
                if written is None:
                    memory.settle()
            except (EngineError, OSError):
                failed = True
                for ask in (memory.settle, lambda: memory.wait_for(memory.num_places - 1)):
                    with pytest.raises((EngineError, OSError)):
                        ask()
            memory.close()
            assert memory.slices == ()
        registered = len(journal.of("register"))
        assert backend.number <= registered + 1
        assert len(freed) == 1
    assert broken_at is not None or untouched_from is not None or not failed
    assert threading.active_count() == threads
    assert backend.statistics().pinned_bytes == 0


def pipeline(journal: Journal, before: Callable[[int], Any]) -> LockedMemory:
    """Four slices of two places."""
    request = PinRequest(prefer_slices=True, touch_threads=2)
    return take_memory(
        Recorded(journal, HostFaults(), None, before), 8, PAGE, request, slice_bytes=2 * PAGE, wait=False
    )


def test_places_are_filled_and_pages_touched_while_other_slices_are_locked() -> None:
    written, touched = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 0:
            assert touched.wait(LIMIT_S), "the last slice is touched while the first one is locked"
        if number == 1:
            assert written.wait(LIMIT_S), "the first slice is filled while the second one is locked"

    with journal_of_touches() as journal:
        original = journal.add

        def add(what: str, begin: int, nbytes: int) -> None:
            original(what, begin, nbytes)
            if what == "touch" and len(journal.of("touch")) == 4:
                touched.set()

        journal.add = add  # type: ignore[method-assign]
        memory = pipeline(journal, before)
        fill(memory, journal, 2)
        assert memory.wait_for(0) == 2
        assert memory.aliases[:2].all()
        assert not memory.aliases[2:].any()
        written.set()
        fill(memory, journal, 8)
        memory.settle()
    assert memory.aliases.all()
    memory.close()


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell's background job is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_reaches_who_waits_and_closing_ends_the_locking() -> None:
    threads, going_on = threading.active_count(), threading.Event()

    def before(number: int) -> None:
        if number == 1:
            # Python sees a signal that comes just before a wait when the wait ends, so a second is sent.
            for _ in range(int(LIMIT_S)):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if going_on.wait(1.0):
                    return
            raise AssertionError("nobody was interrupted")

    with journal_of_touches() as journal:
        memory = pipeline(journal, before)
        with pytest.raises(KeyboardInterrupt):
            fill(memory, journal, 8)
        going_on.set()
        memory.close()
    assert len(journal.of("register")) == 2, "the slice under way is the last one"
    assert threading.active_count() == threads


def test_a_single_slice_and_a_machine_of_one_thread_start_none() -> None:
    threads = threading.active_count()
    for request, slice_bytes in (
        (PinRequest(prefer_slices=True, touch_threads=2), 8 * PAGE),
        (PinRequest(prefer_slices=True, touch_threads=1), 2 * PAGE),
        (PinRequest(prefer_slices=True), 2 * PAGE),
        (PinRequest("none", touch_threads=2), 2 * PAGE),
    ):
        backend = HostBackend(CAP)
        memory = take_memory(backend, 8, PAGE, request, slice_bytes=slice_bytes, num_cpus=8, wait=False)
        assert threading.active_count() == threads
        assert memory.report
        assert memory.wait_for(0) == 8
        memory.close()
