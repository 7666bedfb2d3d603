"""The files of the operating systems offer the same names, and the Windows one never runs without its library."""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import EngineError
from strata.kernels.cpu.library import declare
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


def resident(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which pages of a range exist, as the kernel says (mincore(2))."""
    pages = np.zeros(nbytes // linux.PAGE_BYTES, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)) == 0
    return (pages & 1).astype(bool)


@pytest.mark.parametrize("huge", [False, True])
def test_just_the_pages_of_a_range_are_touched(huge: bool) -> None:
    """Its ends lie within pages and steps; of huge pages the neighbours may come along."""
    region = linux.map_region(3 * linux.TOUCH_STEP, huge_pages=huge)
    try:
        page = linux.PAGE_BYTES
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        always = setting.exists() and "[always]" in setting.read_text()
        first, last = 5 * page, 2 * linux.TOUCH_STEP + 7 * page
        steps = declare("strata_touch_pages", *[ctypes.c_uint64] * 3, returns=ctypes.c_int64)
        assert steps(region.address, 16, linux.TOUCH_STEP) == 1
        linux.touch_pages(region.address + first + 16, last - first - 32)
        found = resident(region.address, region.nbytes)
        assert found[first // page : last // page].all()
        if not huge and not always:
            assert found.sum() == (last - first) // page + 1  # the first page beside
        assert not np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address)).any()
    finally:
        region.free()


def test_no_step_of_touching_is_longer_than_said() -> None:
    steps = declare("strata_touch_pages", *[ctypes.c_uint64] * 3, returns=ctypes.c_int64)
    region, page = linux.map_region(64 * linux.PAGE_BYTES, huge_pages=False), linux.PAGE_BYTES
    try:
        whole = -(-region.address // (8 * page)) * (8 * page)
        for offset, nbytes, expected in (
            (0, 32 * page, 4),
            (0, 32 * page + 1, 5),
            (page, 32 * page, 5),
            (0, 0, 0),
            (5, 1, 1),
        ):
            assert steps(whole + offset, nbytes, 8 * page) == expected, (offset, nbytes)
    finally:
        region.free()
    assert linux.TOUCH_STEP <= 4 << 20


def test_touching_leaves_the_interpreter_to_others() -> None:
    """A thread of plain Python, which gives its lock away every few milliseconds alone, delays one call once."""
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            sum(range(100))

    region = linux.map_region(64 * linux.TOUCH_STEP, huge_pages=True)
    linux.touch_pages(region.address, linux.PAGE_BYTES)  # loads the library
    busy, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(0.5)
    busy.start()
    try:
        began = time.perf_counter()
        linux.touch_pages(region.address, region.nbytes)
        assert time.perf_counter() - began < 16  # 64 steps of half a second else
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        busy.join()
        region.free()
