"""exp, sigmoid, silu and softplus of the native kernels against float64, and equal on every instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from strata.kernels.cpu import library

FUNCTION = library.declare("strata_rows_function", ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
NAMES = ("exp", "sigmoid", "silu", "softplus")


def native(name: str, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    library.check(FUNCTION(NAMES.index(name), x.ctypes.data, x.size, y.ctypes.data))
    return y


def expected(name: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "exp":
            return np.exp(x)
        if name == "softplus":
            return np.logaddexp(0.0, x)
        sigmoid = np.where(x > 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))
        return sigmoid if name == "sigmoid" else x * sigmoid


def every(step: int) -> np.ndarray:
    """Every ``step``-th float of all 2^32, so all exponents and both signs."""
    bits = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    return np.ascontiguousarray(x[np.isfinite(x)])


@pytest.mark.parametrize(
    ("name", "low", "high", "ulp"),
    [
        ("exp", -87.3, 88.72, 1.0),
        ("sigmoid", -87.3, 200.0, 2.5),
        ("silu", -87.3, 200.0, 2.5),
        ("softplus", -87.3, 200.0, 3.0),
    ],
)
def test_errors_stay_within_the_documented_ulp(name: str, low: float, high: float, ulp: float) -> None:
    x = every(1021)  # 4.2 million floats
    x = x[(x >= low) & (x <= high)]
    exact = expected(name, x.astype(np.float64))
    unit = np.maximum(np.spacing(np.abs(exact).astype(np.float32)), 2.0**-149).astype(np.float64)
    worst = np.max(np.abs(native(name, x) - exact) / unit)
    assert worst <= ulp


@pytest.mark.parametrize("name", NAMES)
def test_every_level_gives_the_same_bits(name: str) -> None:
    x = np.concatenate([every(100003), np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0])])
    results = []
    for level in library.available_isa_levels():
        library.select_isa(level)
        results.append(native(name, x))
    for result in results[1:]:
        nan = np.isnan(results[0])
        assert (nan == np.isnan(result)).all()
        assert (results[0][~nan].view(np.uint32) == result[~nan].view(np.uint32)).all()


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("exp", 0.0, 1.0),
        ("exp", -0.0, 1.0),
        ("exp", 88.8, np.inf),
        ("exp", np.inf, np.inf),
        ("exp", -104.1, 0.0),
        ("exp", -np.inf, 0.0),
        ("exp", -103.0, 2.0**-149),
        ("sigmoid", 0.0, 0.5),
        ("sigmoid", np.inf, 1.0),
        ("sigmoid", -np.inf, 0.0),
        ("silu", 100.0, 100.0),
        ("silu", -1e30, 0.0),
        ("softplus", np.inf, np.inf),
        ("softplus", -np.inf, 0.0),
        ("softplus", 50.0, 50.0),
    ],
)
def test_ends(name: str, x: float, y: float) -> None:
    assert native(name, np.float32([x]))[0] == y


@pytest.mark.parametrize("function", [lambda n: native(n, np.float32([np.nan] * 9))])
def test_nan_stays_nan(function: Callable[[str], np.ndarray]) -> None:
    for name in NAMES:
        assert np.isnan(function(name)).all()
