"""The version of this package and the commit that it was made from.

Lives on top because ``--version``, benchmark records and packs all state it. It needs no git: without one, or
outside a checkout, the commit is simply not known. Importing it costs nothing: the package does so at its first line.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["VERSION", "commit", "describe"]

VERSION = "0.1.0"


def commit(ignored: str = "") -> str:
    """Short commit, ``-dirty`` appended when the checkout has uncommitted changes; empty when not known.

    A built package carries ``_commit.txt``; a checkout is asked through git. Changes in the folder ``ignored`` (such as
    results of measurements) do not count.
    """
    import subprocess
    from pathlib import Path

    package = Path(__file__).resolve().parent
    recorded = package / "_commit.txt"
    if recorded.exists():
        return recorded.read_text(encoding="utf-8").strip()
    root = package.parent.parent
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return ""
    try:
        name = _git(root, "describe", "--always", "--abbrev=12")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{ignored or 'none'}")
    except (OSError, subprocess.SubprocessError):
        return ""
    return name + ("-dirty" if changed else "")


def _git(root: Path, *words: str) -> str:
    import subprocess

    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def describe() -> str:
    """What ``strata --version`` prints."""
    known = commit()
    return f"strata {VERSION} ({known})" if known else f"strata {VERSION}"
