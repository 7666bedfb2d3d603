"""What around a process decides how fast its memory is and how much of it can be locked: for ``strata doctor``.

Lives in ``memory`` because only this room knows the operating system. Everything is read below ``root`` or asked of
``system``; nothing is taken for longer than the question. It must not know what the memory will hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from strata.memory.limits import LockRefused, MemoryLimit
from strata.memory.system import system

__all__ = ["Surroundings", "try_lock", "view_surroundings"]

HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
MOST_TOUCHED = 64 << 20  # Windows locks pages by touching them: a trial there stays small
NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class Surroundings:
    """``huge_pages``: 'always', 'madvise', 'never', or '' where the system has no such setting. ``nodes``: memory nodes
    (NUMA). ``lockable``: bytes of ``asked`` that a trial could lock; ``lock_refusal`` says why not all."""

    memory_limits: tuple[MemoryLimit, ...]
    cpu_quota: float | None
    usable_cpus: int
    locked_limit: int | None
    huge_pages: str
    nodes: int
    asked: int
    lockable: int
    lock_refusal: str


def view_surroundings(asked: int, root: Path = Path("/")) -> Surroundings:
    """``asked``: bytes that an expert copy could have, which a trial then locks and lets go untouched."""
    lockable, refusal = try_lock(asked)
    return Surroundings(
        memory_limits=tuple(system.memory_limits(root)),
        cpu_quota=system.cpu_quota(root),
        usable_cpus=system.usable_cpus(),
        locked_limit=system.locked_limit(),
        huge_pages=_chosen(root / HUGE_PAGES),
        nodes=max(1, len(list((root / NODES).glob("node[0-9]*")))),
        asked=asked,
        lockable=lockable,
        lock_refusal=refusal,
    )


def try_lock(asked: int) -> tuple[int, str]:
    """(bytes that could be locked, why not more). Where pages are locked on touch, none is touched."""
    refusal = ""
    if os.name == "nt":
        asked = min(asked, MOST_TOUCHED)
    sizes = [asked, system.locked_limit() or 0]
    for nbytes in sizes:
        nbytes = min(nbytes, asked) // system.PAGE_BYTES * system.PAGE_BYTES
        if nbytes <= 0:
            continue
        try:
            region = system.map_region(nbytes)
        except MemoryError as error:
            refusal = refusal or str(error)
            continue
        try:
            system.lock_pages(region.address, region.nbytes)
            system.unlock_pages(region.address, region.nbytes)
            return nbytes, refusal
        except LockRefused as error:
            refusal = refusal or error.reason
        finally:
            region.free()
    return 0, refusal


def _chosen(path: Path) -> str:
    """The word in brackets of a kernel setting such as 'always [madvise] never'."""
    try:
        words = path.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
