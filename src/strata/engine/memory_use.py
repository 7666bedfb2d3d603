"""What a loaded model took of VRAM and RAM, beside what was planned: measured, for benchmarks and tests.

Lives in ``engine`` because the plan and what took the memory meet here. It takes nothing and decides nothing; a card is
asked through what its backend counts. It must not know models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.memory.planner import GIB, format_bytes
from strata.memory.system import system

if TYPE_CHECKING:
    from strata.experts.statistics import ExpertStatistics
    from strata.kernels.backend import Backend
    from strata.memory.planner import ResolvedPlan

__all__ = ["CardUse", "MemoryUse", "measure_use"]


@dataclass(frozen=True)
class CardUse:
    """Bytes of VRAM. ``most``: taken at once, ``slots`` of experts included; ``planned``: without the reserve;
    ``total``: what the card has less free than at the opening, the driver's own memory for kernels and graphs included.
    ``cap`` is ``--vram-gib``."""

    most: int
    slots: int
    planned: int
    total: int
    cap: int | None

    def line(self) -> str:
        cap = "" if self.cap is None else f", cap {format_bytes(self.cap)}"
        return (
            f"VRAM at most {format_bytes(self.most)} ({format_bytes(self.slots)} of expert slots), "
            f"{format_bytes(self.planned)} planned{cap}; the card has {format_bytes(self.total)} less free than before"
        )


@dataclass(frozen=True)
class MemoryUse:
    """Bytes and seconds. ``ram`` and ``ram_most`` of this process, None where the system does not say; ``locked``:
    bytes of experts that were page-locked in ``lock_seconds``, on ``lock_path`` (0: nothing)."""

    card: CardUse | None
    ram: int | None
    ram_most: int | None
    ram_planned: int
    locked: int
    lock_seconds: float
    lock_path: int

    @property
    def lock_rate(self) -> float:
        """GiB a second of page-locking; 0 where nothing was, and without a card: the system locks on first use then."""
        return self.locked / GIB / self.lock_seconds if self.card and self.locked and self.lock_seconds else 0.0

    def lines(self) -> list[str]:
        found = [] if self.card is None else [self.card.line()]
        if self.ram is not None and self.ram_most is not None:
            found.append(
                f"RAM {format_bytes(self.ram)} now, at most {format_bytes(self.ram_most)}, "
                f"{format_bytes(self.ram_planned)} planned for the model, headroom included"
            )
        if self.locked:
            rate = f" in {self.lock_seconds:.2f} s ({self.lock_rate:.1f} GiB/s)" if self.lock_rate else ""
            found.append(f"page-locked {format_bytes(self.locked)}{rate}, path {self.lock_path}")
        return found

    def as_details(self) -> dict[str, float]:
        """For a record: GiB to two decimals."""
        sizes: dict[str, int | None] = {"ram_gib": self.ram, "ram_most_gib": self.ram_most, "locked_gib": self.locked}
        if self.card is not None:
            card = self.card
            sizes |= {"vram_most_gib": card.most, "vram_planned_gib": card.planned, "vram_total_gib": card.total}
        found = {name: round(size / GIB, 2) for name, size in sizes.items() if size is not None}
        return found | {"lock_seconds": round(self.lock_seconds, 2), "lock_gib_per_s": round(self.lock_rate, 2)}


def measure_use(plan: ResolvedPlan, backend: Backend, experts: ExpertStatistics) -> MemoryUse:
    """Of what was loaded under ``plan``, now."""
    ram, most = system.process_memory() or (None, None)
    return MemoryUse(
        _measure_card(plan, backend), ram, most, plan.ram_bytes, experts.pinned_bytes, experts.page_lock_seconds,
        experts.page_lock_path,
    )  # fmt: skip


def _measure_card(plan: ResolvedPlan, backend: Backend) -> CardUse | None:
    from strata.kernels.cuda.backend import CudaBackend

    if not isinstance(backend, CudaBackend):
        return None
    found = backend.statistics()
    slots = plan.num_device_slots * plan.stride
    most = found.device_bytes + found.torch_peak_bytes
    return CardUse(most, slots, plan.vram_bytes - plan.vram.get("reserve", 0), found.card_bytes, found.cap_bytes)
