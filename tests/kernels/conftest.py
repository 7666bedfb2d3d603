"""Puts the instruction set and the threads back after every test of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata.kernels.cpu import library, pool


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    level, threads = library.isa(), pool.threads()
    yield
    library.select_isa(level)
    pool.configure(threads)
