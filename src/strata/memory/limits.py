"""What an operating system's file answers with: a limit on this process, and a refusal to lock pages.

Lives apart so that the files of the systems share the types and nothing else. It must not ask the system anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Advice", "LockRefused", "MemoryLimit"]

Advice = Literal["huge", "will_need"]


class LockRefused(Exception):  # noqa: N818 - an answer the caller works with, not a mistake
    """The system did not lock the pages; ``reason`` says why in its own words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process: ``name`` for people, ``limit`` and ``used`` bytes (reclaimable cache not counted)."""

    name: str
    limit: int
    used: int
