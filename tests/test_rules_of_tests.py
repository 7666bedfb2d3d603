"""The rules of conftest.py bite: unexplained skips fail; what is left out is counted in the last lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

SUITE = """
import pytest

def test_passes(): pass

def test_skips_by_itself(): pytest.skip("no reason that counts")

@pytest.mark.skipif(True, reason="never")
def test_skipped_by_a_marker(): pass

@pytest.mark.gpu
def test_on_a_card(): pass

@pytest.mark.avx512
@pytest.mark.gpu
def test_on_both(): pass

@pytest.mark.xfail(reason="known", strict=True)
def test_known_to_fail(): assert False

@pytest.mark.long
def test_of_many_minutes(): pass

@pytest.mark.long
@pytest.mark.gpu
def test_of_many_minutes_on_a_card(): pass
"""


def run_suite(root: Path, folder: Path, *words: str, require: str = "") -> tuple[int, str]:
    shutil.copy(root / "tests" / "conftest.py", folder)
    shutil.copy(root / "pyproject.toml", folder)
    (folder / "tests").mkdir(exist_ok=True)
    shutil.move(folder / "conftest.py", folder / "tests" / "conftest.py")
    (folder / "tests" / "test_some.py").write_text(SUITE)
    environment = {**os.environ, "STRATA_TESTS_REQUIRE": require, "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S,
    )  # fmt: skip
    return result.returncode, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_unexplained_skips_fail(root: Path, tmp_path: Path, workers: str) -> None:
    status, out = run_suite(root, tmp_path, "-n", workers)
    assert status == 1
    assert "skipped, which only tests marked gpu, avx512, browser may be" in out
    assert re.search("1 failed, 1 passed, 2 skipped,( 2 deselected,)? 1 xfailed, 1 error", out)
    assert out.rstrip().splitlines()[-2:] == [
        "left for make test-all: 2",
        "not run on this machine: 2 gpu, 1 avx512, 0 browser",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_long_tests_run_where_they_are_asked_for(root: Path, tmp_path: Path, workers: str) -> None:
    _, out = run_suite(root, tmp_path, "-n", workers, "--long")
    assert "1 failed, 2 passed, 3 skipped, 1 xfailed, 1 error" in out
    assert "left for make test-all" not in out
    assert out.rstrip().splitlines()[-1] == "not run on this machine: 3 gpu, 1 avx512, 0 browser"


def test_only_long_tests_that_were_asked_for_are_counted_as_left(root: Path, tmp_path: Path) -> None:
    status, out = run_suite(root, tmp_path, "-k", "passes or on_a_card and many")
    assert status == 0
    assert "1 passed" in out
    assert out.rstrip().splitlines()[-2] == "left for make test-all: 1"


def test_a_whole_file_may_not_be_skipped(root: Path, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text("import pytest\npytest.importorskip('absent_package')\n")
    status, out = run_suite(root, tmp_path, "tests/test_other.py")
    assert status != 0
    assert "a whole file may not be skipped" in out


def test_asked_for_by_name_hardware_tests_run(root: Path, tmp_path: Path) -> None:
    status, out = run_suite(root, tmp_path, "-m", "gpu and not avx512", require="gpu")
    assert status == 0
    assert "1 passed" in out


def test_a_missing_oracle_stops_the_run(root: Path, tmp_path: Path) -> None:
    (tmp_path / "hide.py").write_text(
        "import importlib.util\nfound = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'transformers' else found(name, *rest)\n"
    )
    status, out = run_suite(root, tmp_path, "-p", "hide")
    assert status != 0
    assert "passed" not in out
