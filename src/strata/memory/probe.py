"""What this PC has: RAM and the limits on it, processors, cards. Read once at start, without torch.

Lives in ``memory`` because the planner's arithmetic starts from it. ``--ram-gib`` and ``--vram-gib`` replace what the
system claims. It must not allocate anything and must not know a model.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strata.memory.system import system

__all__ = ["Gpu", "Machine", "find_gpus", "probe_machine"]


@dataclass(frozen=True)
class Gpu:
    """One card; bytes."""

    name: str
    memory_total: int
    memory_free: int
    driver: str


@dataclass(frozen=True)
class Machine:
    """Bytes and counts. ``ram_available`` is what may still be taken, ``ram_rule`` names what sets it."""

    cpu_name: str
    num_cpus: int
    ram_total: int
    ram_available: int
    ram_rule: str
    locked_limit: int | None
    pin_rooms: tuple[int, ...]  # for each display adapter, what its driver lets be page-locked (Windows)
    gpus: tuple[Gpu, ...]


def probe_machine(
    *,
    ram_bytes: int | None = None,
    root: Path = Path("/"),
    gpus: Callable[[], tuple[Gpu, ...]] | None = None,
) -> Machine:
    """Reads the machine below ``root``. ``ram_bytes`` (``--ram-gib``) is taken in place of what it says."""
    total, available = system.read_ram(root)
    rule = "free RAM"
    for limit in system.memory_limits(root):
        room = max(0, limit.limit - limit.used)
        total = min(total, limit.limit)
        if room < available:
            available, rule = room, limit.name
    if ram_bytes is not None:
        total, available, rule = max(total, ram_bytes), ram_bytes, "--ram-gib"
    cpus = system.usable_cpus()
    quota = system.cpu_quota(root)
    if quota is not None:
        cpus = max(1, min(cpus, int(quota + 0.5)))
    return Machine(
        cpu_name=read_cpu_name(root),
        num_cpus=cpus,
        ram_total=total,
        ram_available=available,
        ram_rule=rule,
        locked_limit=system.locked_limit(),
        pin_rooms=system.pin_rooms(),
        gpus=find_gpus() if gpus is None else gpus(),
    )


def read_cpu_name(root: Path = Path("/")) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA cards that the driver's own library lists; none when there is no driver."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        cards = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            cards.append(Gpu(_text(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), driver))
        return tuple(cards)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
