"""A request's way to stop: checked between layers of a prompt chunk and between rounds.

Lives in ``engine`` because only the engine knows where stopping is safe: a forward that is left half-way
has recorded rows but committed none, so the session stays as it was.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from strata.kernels.ops import ExpertExecutor

__all__ = ["CancellableExperts", "Cancellation", "Cancelled"]


class Cancelled(Exception):  # noqa: N818 - what happened, not a fault
    """The request was cancelled by its caller. Not a fault: it never reaches a user as an error."""


class Cancellation:
    """One flag, set from any thread (a closed socket, Ctrl-C), seen by the thread that computes."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        self._event.set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        if self._event.is_set():
            raise Cancelled


class CancellableExperts:
    """An ``ExpertExecutor`` that looks at the flag once a layer, so a long chunk stops within a layer's time."""

    def __init__(self, experts: ExpertExecutor, cancellation: Cancellation) -> None:
        self._experts = experts
        self._cancellation = cancellation

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        self._cancellation.check()
        return self._experts(layer, x_TH, ids_TK, weights_TK)
