"""The files of the operating systems offer the same names, and the Windows one never runs without its library."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

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
