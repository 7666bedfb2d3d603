"""Writes files whole or not at all.

Lives on top because packs, benchmark records, profiles and settings all need it. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["atomic_write", "sync_folder"]


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb", *, durable: bool = True) -> Iterator[IO[Any]]:
    """Opens a temporary file beside ``path`` that takes its name when the block ends well.

    A reader sees the old content or all of the new, also after a crash: the bytes are on disk (``durable``) before
    the rename. On an exception the temporary file is removed and ``path`` is untouched. ``mode`` is 'wb' or 'w'
    (UTF-8). OSError passes through, ENOSPC included: the caller knows how many bytes it needed. A process that is
    killed leaves at most one ``.NAME.*.partial`` file, which no reader takes for the real one.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode {mode!r} is not 'w' or 'wb'")
    target = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, mode, encoding=None if mode == "wb" else "utf-8") as handle:
            yield handle
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        temporary.chmod(0o666 & ~current_umask())  # mkstemp makes private files
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(target.parent)


def current_umask() -> int:
    """The process's umask. Reading it means setting it, so it is put back at once."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` durable, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
