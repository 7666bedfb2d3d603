"""The files of the operating systems offer the same names, and the Windows one never runs without its library."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from strata.errors import EngineError
from strata.memory import linux, windows


def test_both_systems_offer_the_same_names_and_arguments() -> None:
    assert linux.__all__ == windows.__all__
    for name in linux.__all__:
        one, two = getattr(linux, name), getattr(windows, name)
        if inspect.isfunction(one):
            assert inspect.signature(one).parameters.keys() == inspect.signature(two).parameters.keys(), name


def test_windows_calls_are_bound_by_the_names_that_the_library_exports(root: Path) -> None:
    header = (root / "csrc" / "windows" / "memory_calls.h").read_text()
    source = Path(windows.__file__).read_text()
    declared = set(re.findall(r"^STRATA_WINDOWS_API \w+ strata_windows_(\w+)\(", header, re.MULTILINE))
    assert len(declared) == 11
    bound = source[source.index("for name, arguments in") : source.index("}.items()")]
    for name in declared - {"page_bytes"}:
        assert f'"{name}"' in bound, name


def test_without_its_library_windows_says_so() -> None:
    with pytest.raises(EngineError, match="strata_windows"):
        windows.read_ram()


def test_linux_has_no_shared_segment() -> None:
    assert linux.pin_rooms() == ()


def test_pages_are_touched_in_steps_that_end_where_huge_pages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever maps memory waits for one step at most, and no two steps touch the same huge page."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(linux, "advise", lambda address, nbytes, advice: not asked.append((address, nbytes)))
    begin, nbytes = 5 * linux.PAGE_BYTES, 3 * linux.TOUCH_STEP
    linux.touch_pages(begin, nbytes)
    assert asked[0][0] == begin
    assert all(first + size == second for (first, size), (second, _) in pairwise(asked))
    assert sum(size for _, size in asked) == nbytes
    assert all((first + size) % (2 << 20) == 0 and size <= linux.TOUCH_STEP for first, size in asked[:-1])


def test_pages_are_touched_where_the_kernel_does_not_know_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.full(linux.TOUCH_STEP + 100, 1, np.uint8)
    monkeypatch.setattr(linux, "advise", lambda *_: False)
    linux.touch_pages(memory.ctypes.data, memory.nbytes)
    assert not memory.any()
