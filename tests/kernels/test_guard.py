"""What stands against stale memory and reads past an end bites: each is tried with a planted fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strata.errors import EngineError
from strata.kernels.cpu import library
from strata.kernels.cpu.library import check
from strata.kernels.cpu.row_calls import CALLS
from tests.kernels.guard import Guarded, behind

PLANTED = """
import torch
from strata.kernels.cpu.library import check
from strata.kernels.cpu.row_calls import CALLS
from tests.kernels.guard import behind
x, y = torch.ones({given}), torch.empty(100)
if {guarded}:
    x = behind(x)
print("before", flush=True)
check(CALLS.add(x.data_ptr(), x.data_ptr(), 17, y.data_ptr()))
print("after", flush=True)
"""


def run_planted(root: Path, given: int, *, guarded: bool, level: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(root), str(root / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "STRATA_ISA": level or library.isa()}
    return subprocess.run(
        [sys.executable, "-c", PLANTED.format(given=given, guarded=guarded)],
        env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip


@pytest.mark.slow
def test_a_read_of_one_number_past_an_input_is_found(root: Path) -> None:
    """An operation that is told of 17 numbers where there are 16. Guard pages find it with every library; the one with
    checks also finds it where memory goes on, except in the masked loads of AVX2, which it does not look at."""
    result = run_planted(root, 17, guarded=True)
    assert result.returncode == 0, result.stderr
    result = run_planted(root, 16, guarded=True)
    assert result.returncode != 0
    assert "after" not in result.stdout
    if os.environ.get("STRATA_NATIVE"):
        result = run_planted(root, 16, guarded=False, level="scalar")
        assert "heap-buffer-overflow" in result.stderr
        assert "after" not in result.stdout


def test_a_copy_ends_at_the_edge_with_the_same_numbers_and_strides() -> None:
    wide = torch.arange(60.0).view(5, 12)
    for tensor in (wide, wide[:, :7], wide[2:4, :1], wide.bfloat16(), wide.to(torch.int8), wide[0].expand(3, 12)):
        copy = behind(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        last = sum((size - 1) * stride for size, stride in zip(copy.shape, copy.stride(), strict=True)) + 1
        assert (copy.data_ptr() + last * copy.element_size()) % 4096 == 0


def test_what_an_operation_changes_in_place_comes_back() -> None:
    class Change:
        def grow(self, x: torch.Tensor) -> None:
            x += 1

    x = torch.zeros(3)
    Guarded(Change()).grow(x)
    assert x.tolist() == [1, 1, 1]


def test_new_tensors_are_poisoned() -> None:
    assert torch.empty(1000).isnan().all()
    assert torch.empty_like(torch.zeros(5)).isnan().all()
    assert (torch.empty(1000, dtype=torch.int32) == 2**31 - 1).all()


def test_a_planted_stale_result_shows() -> None:
    """An operation that forgets its last number."""
    x, y = torch.ones(10), torch.empty(10)
    check(CALLS.add(x.data_ptr(), x.data_ptr(), 9, y.data_ptr()))
    assert y[:9].tolist() == [2.0] * 9
    assert y[9].isnan()


def test_another_library_that_is_not_there_is_named(root: Path) -> None:
    code = "from strata.kernels.cpu import library; library.library()"
    environment = {**os.environ, "STRATA_NATIVE": "/nowhere/lib.so", "PYTHONPATH": str(root / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert EngineError.__name__ in result.stderr
    assert "/nowhere/lib.so" in result.stderr
