"""The bits of native results: compared with each other, and on every instruction set that the processor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from strata.kernels.cpu import library

Result = TypeVar("Result", torch.Tensor, list[torch.Tensor])


def same_bits(a: torch.Tensor | list[torch.Tensor], b: torch.Tensor | list[torch.Tensor]) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
    return all(same_bits(left, right) for left, right in zip(a, b, strict=True))


def on_every_level(compute: Callable[[], Result]) -> Result:
    """The result of the last level, after comparing all levels bit for bit."""
    results = []
    for level in library.available_isa_levels():
        library.select_isa(level)
        results.append(compute())
    for result in results[1:]:
        assert same_bits(results[0], result)
    return results[-1]
