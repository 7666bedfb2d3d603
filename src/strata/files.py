"""Writes files whole or not at all, and reads files alone: never a pipe that nobody writes or a device without end.

Lives on top because packs, benchmark records, profiles and settings all need it. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["MOST_TEXT_BYTES", "NotRegularError", "atomic_write", "open_regular", "read_regular", "sync_folder"]

MOST_TEXT_BYTES = 1 << 30  # of a file that is read whole: settings, lists of names, tokenizers
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


class NotRegularError(OSError):
    """What a name leads to is no regular file. ``strerror`` says what it is."""


def open_regular(path: Path | str, flags: int = 0, *, follow: bool = True) -> int:
    """A descriptor of the regular file ``path``, for reading; ``flags`` are added to those of ``os.open``.

    The caller owns it. Links are followed; without ``follow`` the last part of the path must be none. Raises OSError
    whose ``strerror`` says what is wrong, ``NotRegularError`` of what is no regular file (EISDIR, EINVAL): a pipe would
    keep the reader waiting for a writer, a device may have no end. Waits for nobody.
    """
    # Opening a device can have effects, so the name is looked at first; what was opened is looked at again, since the
    # name may lead elsewhere by then. Decision record 0117.
    _check_regular(path, os.stat(path, follow_symlinks=follow))
    wanted = ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK", "O_NOCTTY")
    for name in wanted:
        flags |= getattr(os, name, 0)
    if not follow:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotRegularError(errno.EINVAL, "it is a link, not a file", str(path)) from error
        raise
    try:
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path | str, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise NotRegularError(number, f"it is {KINDS.get(kind, 'something else')}, not a file", str(path))


def read_regular(path: Path | str, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """The whole of a regular file. Raises OSError as ``open_regular`` does, and EFBIG above ``most_bytes``."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most_bytes:
            parts, left = [], most_bytes + 1
            while left > 0 and (part := file.read(min(left, max(size, 1 << 16)))):  # those of /proc say size 0
                parts.append(part)
                left -= len(part)
            size = most_bytes + 1 - left
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it holds more than {most_bytes:,} bytes", str(path))
    return b"".join(parts)


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
