"""The page-locked memory that a decode round on a GPU shares with the CPU: the mailbox, its lists, inputs and answers.

Lives beside ``mailbox.h``, whose structure it lays out. One block, taken once; the host's side is numpy arrays, the
device's side addresses. It must not know tiers, models or who computes.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from strata.kernels.backend import Backend
from strata.kernels.cuda.program import MAX_WINDOW, Address

__all__ = ["INPUT_WORDS", "Box", "Mailbox", "mailbox_bytes"]

Number = TypeVar("Number", bound=np.generic)
_LINE = 64
TASK_BYTES = 12  # StrataMailTask
INPUT_WORDS = MAX_WINDOW + 4  # of a round: position, accepted rows, turn, ids, ticket


class Box(ctypes.Structure):
    """``StrataMailbox`` of mailbox.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("posted", "layer", "num_tasks", "num_picks", "num_rows")),
        ("unused_gpu", ctypes.c_uint32 * 11),
        ("done", ctypes.c_uint32),
        ("abort", ctypes.c_uint32),
        ("unused_cpu", ctypes.c_uint32 * 14),
        ("ended", ctypes.c_uint32),
        ("aborted", ctypes.c_uint32),
        ("aborted_layer", ctypes.c_int32),
        ("unused_end", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("hits", "aliases", "others")),
        ("unused_tail", ctypes.c_uint32 * 6),
    )


def _sizes(hidden: int, top_k: int, vocabulary: int, input_words: int) -> dict[str, int]:
    picks = MAX_WINDOW * top_k
    return {
        "box": ctypes.sizeof(Box),
        "x": MAX_WINDOW * hidden * 4,
        "tasks": picks * TASK_BYTES,
        "rows": picks * 4,
        "slots": picks * 4,
        "out": picks * hidden * 4,
        "flags": MAX_WINDOW,
        "inputs": (2 + input_words) * 4,
        "best": MAX_WINDOW * 4,
        "row_flags": MAX_WINDOW,
        "logits": MAX_WINDOW * vocabulary * 4,
    }


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def mailbox_bytes(hidden: int, top_k: int, vocabulary: int) -> int:
    """Page-locked RAM that a mailbox of ``INPUT_WORDS`` takes."""
    return sum(map(_whole_lines, _sizes(hidden, top_k, vocabulary, INPUT_WORDS).values()))


class Mailbox:
    """Owns the memory until ``close``. ``device(name)`` is where the device sees a part.

    Parts: ``box``; ``x`` FP32 [W, H]; ``tasks``, ``rows``, ``slots`` of the CPU's list; ``out`` FP32 [W * K, H];
    ``flags`` uint8 [W]; ``inputs`` int32 (ticket, limit in microseconds, then the words that the device copies);
    ``best`` int32 [W], ``row_flags`` uint8 [W], ``logits`` FP32 [W, V]: what a round answers. W is ``MAX_WINDOW``.
    """

    def __init__(self, backend: Backend, hidden: int, top_k: int, vocabulary: int, input_words: int) -> None:
        self._offsets, total = {}, 0
        for name, nbytes in _sizes(hidden, top_k, vocabulary, input_words).items():
            self._offsets[name] = total
            total += _whole_lines(nbytes)
        self.nbytes = total
        self._buffer, self._registration = backend.allocate_pinned(total)
        self._alias = self._registration.alias(self._buffer.address)
        ctypes.memset(self._buffer.address, 0, total)
        self.box = Box.from_address(self.host("box"))
        self.inputs: npt.NDArray[np.int32] = self._array("inputs", np.int32, (2 + input_words,))
        self.best: npt.NDArray[np.int32] = self._array("best", np.int32, (MAX_WINDOW,))
        self.row_flags: npt.NDArray[np.uint8] = self._array("row_flags", np.uint8, (MAX_WINDOW,))
        self.logits: npt.NDArray[np.float32] = self._array("logits", np.float32, (MAX_WINDOW, vocabulary))

    def host(self, name: str) -> int:
        return int(self._buffer.address) + self._offsets[name]

    def device(self, name: str) -> Address:
        return Address(self._alias + self._offsets[name])

    def close(self) -> None:
        self._registration.unregister()
        self._buffer.free()

    def _array(self, name: str, dtype: type[Number], shape: tuple[int, ...]) -> npt.NDArray[Number]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.host(name)))
        return raw.view(dtype).reshape(shape)
