"""What memory this process may have by its own limits, and the refusal of what is too little to import anything.

Lives in ``cli`` and reads the limits as text: the room that knows the system is not imported where memory for an import
may be what is missing.
"""

from __future__ import annotations

from pathlib import Path

from strata.errors import MemoryPlanError

__all__ = ["WAY_OUT", "describe_limits", "refuse_too_little"]

WAY_OUT = "raise the limit (ulimit -v, ulimit -d, a container's), or close other programs"
SOURCE = Path("/proc/self/limits")
LIMITS = {"Max address space": "address space", "Max data size": "data"}
# Below these the import of PyTorch's CPU build alone does not end with an error but aborts the process, or is killed by
# the linear algebra below it; it was seen to need 800 and 300 MB with two threads; other builds take more.
LEAST = {"address space": 640 * 10**6, "data": 210 * 10**6}


def read_limits() -> dict[str, int]:
    """Bytes by name, where a limit is set; none on a system that does not tell."""
    try:
        lines = SOURCE.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found = {}
    for line in lines:
        for start, name in LIMITS.items():
            words = line[len(start) :].split()
            if line.startswith(start) and words and words[0].isdigit():
                found[name] = int(words[0])
    return found


def describe_limits() -> str:
    """'this process may have 600 MB of address space'; empty where nothing limits it."""
    said = [f"{size / 1e6:,.0f} MB of {name}" for name, size in read_limits().items()]
    return f"this process may have {' and '.join(said)}" if said else ""


def refuse_too_little() -> None:
    """Raises ``MemoryPlanError`` where running a model cannot even begin."""
    for name, size in read_limits().items():
        if size < LEAST[name]:
            raise MemoryPlanError(
                f"not enough memory: {describe_limits()}, and a model takes more than {LEAST[name] / 1e6:,.0f} MB of "
                f"{name} to begin",
                WAY_OUT,
                short_bytes=LEAST[name] - size,
            )
