"""Puts the instruction set and the threads back after every test of the native kernels, and poisons their memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata.kernels.cpu import library, pool
from tests.kernels.guard import poisoned


@pytest.fixture(autouse=True)
def _restore(request: pytest.FixtureRequest) -> Iterator[None]:
    level, threads = library.isa(), pool.threads()
    if request.node.get_closest_marker("gpu") is not None:  # torch's own products on a card would be refused or slower
        yield
    else:
        with poisoned():
            yield
    library.select_isa(level)
    pool.configure(threads)
