"""Writes files whole or not at all.

Lives on top because packs, benchmark records, profiles and settings all need it. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
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
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.partial")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(descriptor, mode, encoding=None if mode == "wb" else "utf-8") as handle:
            yield handle
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in ``folder`` durable, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
