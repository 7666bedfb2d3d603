"""The garbage collector stays out of imports, and is left as it was found."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from strata import collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_until_it_goes_on_and_what_is_there_is_never_looked_at() -> None:
    collector.pause()
    collector.pause()
    assert not gc.isenabled()
    collector.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    collector.pause()
    collector.resume()
    assert not gc.isenabled()


def test_a_program_that_imports_strata_keeps_its_collector() -> None:
    words = (
        "from strata import interrupts; interrupts.in_order(); import gc; print(gc.isenabled(), gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0\n"


def test_a_command_collects_again_once_everything_is_imported() -> None:
    words = (
        "import gc, sys, strata.cli.app as app\n"
        "from strata import console, interrupts\n"
        "def main():\n"
        "    print(gc.isenabled()); interrupts.in_order(); print(gc.isenabled()); return 0\n"
        "app.main = main; console.run()"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue\n"
