"""Runs independent pieces of work on a few threads and hands the results back in order, few of them waiting.

Lives in ``checkpoint``: packing is bound by torch's conversions, loading by page faults and checksums, and all of these
let other threads run. The results do not depend on the number of threads. It must not know what the work is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["in_order", "worker_count"]

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_WORKERS = 8  # each holds one piece; more only fight over memory bandwidth


def worker_count() -> int:
    """Threads that ``in_order`` uses: the processors this process may use, at most ``MOST_WORKERS``."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, allowed)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], ahead: int | None = None) -> Iterator[Result]:
    """``work(item)`` of each item, in the order of the items, at most ``ahead`` of the caller; None: a few.

    The first error (or an interruption of the caller) ends it: what has not begun is dropped, what runs is awaited.
    """
    workers = worker_count()
    threads_before = torch.get_num_threads()
    pending: deque[Future[Result]] = deque()
    # Each worker computes on itself alone: torch's own threads would be workers squared.
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > (workers if ahead is None else ahead):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            torch.set_num_threads(threads_before)
