"""Memory that stands against reads and writes past its end, and memory whose old contents are seen.

Two mechanisms for all tests of native kernels (decision record 0110). ``behind`` copies a tensor so that its last byte
is the last before a page that may not be touched: who reads one byte further gets the error of a memory fault, or dies,
with the library as it is shipped and at every instruction set. ``poisoned`` fills what nobody wrote: torch's new
tensors with NaN (floats) or the largest number (integers), the library's scratch with bytes of 0xFF.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from strata.kernels.cpu import library

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Room:
    """``nbytes`` of memory before a page that may not be touched. What is handed out keeps it alive."""

    def __init__(self, nbytes: int) -> None:
        self.size = -(-max(nbytes, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, self.size + PAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[: self.size]
        self.bytes.fill_(0xFF)  # what lies before a smaller buffer
        if _LIBC.mprotect(self.bytes.data_ptr() + self.size, PAGE, 0):  # PROT_NONE
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor``, strides and all, whose last element ends the room; an earlier one is overwritten."""
        if tensor.numel() == 0:
            return tensor
        span = span_of(tensor)
        end = self.bytes[self.size - span * tensor.element_size() :].view(tensor.dtype)
        end.copy_(tensor.as_strided((span,), (1,)))
        return end.as_strided(tensor.shape, tensor.stride(), end.storage_offset())


def span_of(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def behind(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` that ends where touching is forbidden."""
    return Room(span_of(tensor) * tensor.element_size()).place(tensor)


def array_behind(array: np.ndarray) -> np.ndarray:
    """A copy of a contiguous array, of any type, that ends where touching is forbidden."""
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return behind(flat).numpy().view(array.dtype).reshape(array.shape) if flat.numel() else array


def everything_behind(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """``value`` with all tensors in it, also those of dataclasses and lists, replaced; (tensor, copy) are noted."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:
            return value
        copies.append((value, behind(value)))
        return copies[-1][1]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: everything_behind(getattr(value, f.name), copies) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        return type(value)(everything_behind(item, copies) for item in value)
    return value


class Guarded:
    """Operations that see every tensor at the edge of forbidden memory; what they change in place is copied back."""

    def __init__(self, ops: object) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._ops, name)

        def call(*arguments: Any, **options: Any) -> Any:
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            words = [everything_behind(value, copies) for value in arguments]
            named = {key: everything_behind(value, copies) for key, value in options.items()}
            result = operation(*words, **named)
            for original, copy in copies:
                if copy.is_contiguous() and not torch.equal(original.view(torch.uint8), copy.view(torch.uint8)):
                    original.copy_(copy)
            return result

        return call


@contextmanager
def poisoned() -> Iterator[None]:
    """While it lasts, new tensors and the library's scratch hold what no result may be made of."""
    loaded = library.library()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    loaded.strata_scratch_poison(1)
    try:
        yield
    finally:
        loaded.strata_scratch_poison(0)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
