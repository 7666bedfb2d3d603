"""A folder that is written whole or not at all: work beside it, sync, rename; nothing half-done can be loaded.

Lives in ``checkpoint``; the pack writer and the export write through it. While it is written it is called
``NAME.unfinished``; a killed run leaves that folder, which no reader takes and the next run clears. It must not know
what it writes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from strata.checkpoint.recognise import UNFINISHED_SUFFIX
from strata.errors import CheckpointError
from strata.files import open_regular

__all__ = ["WholeFolder"]

_LOCK_FILE = ".lock"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WholeFolder:
    """``with WholeFolder(destination, needed_bytes) as folder: ...`` writes into ``folder.path``.

    A normal exit syncs and renames to ``destination``; an error or an interruption removes everything. Raises
    ``CheckpointError`` before anything is written if the destination exists, another run writes it, or the disk has
    less than ``needed_bytes``; and when the disk fills later.
    """

    def __init__(self, destination: str | Path, needed_bytes: int) -> None:
        self.destination = Path(destination).expanduser().absolute()
        self.needed_bytes = needed_bytes
        self.path = self.destination.with_name(self.destination.name + UNFINISHED_SUFFIX)
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> WholeFolder:
        if self.destination.exists() and (not self.destination.is_dir() or any(self.destination.iterdir())):
            raise CheckpointError(f"{self.destination} exists already", "give another destination or remove it first")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise self._unwritable(self.path, error) from error
        self._clear()
        free = shutil.disk_usage(self.path).free
        if free < self.needed_bytes:
            self._remove()
            raise self._no_room(free)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._publish()
            except OSError as failure:
                self._remove()
                raise self._explain(failure) from failure
            return
        free = shutil.disk_usage(self.path).free
        self._remove()
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise self._no_room(free, error) from error

    def write(self, name: str, fill: Callable[[IO[bytes]], None]) -> int:
        """Creates a file, lets ``fill`` write it, syncs it, and returns its size."""
        with (self.path / name).open("xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def copy(self, source: Path) -> int:
        """Copies the bytes of a regular file, or of the one that a link leads to, under its own name, syncs the copy,
        and returns its size."""
        with os.fdopen(open_regular(source), "rb") as opened:
            return self.write(source.name, lambda file: shutil.copyfileobj(opened, file))

    def _publish(self) -> None:
        _sync_folder(self.path)
        if self.destination.exists():
            self.destination.rmdir()  # empty, or entering would have refused
        os.replace(self.path, self.destination)  # still locked: a second run must not clear what is being renamed
        (self.destination / _LOCK_FILE).unlink()
        self._drop_lock()
        _sync_folder(self.destination.parent)

    def _no_room(self, free: int, error: OSError | None = None) -> CheckpointError:
        limited = error is not None and error.errno == errno.EFBIG
        what = "a file grew past the limit in force" if limited else "the disk is full"
        if error is None:
            what = "too little room on the disk"
        return CheckpointError(
            f"{what}: {self.destination} needs {self.needed_bytes} bytes, {free} are free",
            "free some space, or give a destination on another disk; nothing was left behind",
        )

    def _explain(self, error: OSError) -> CheckpointError:
        if error.errno in _DISK_FULL:
            return self._no_room(shutil.disk_usage(self.destination.parent).free, error)
        return self._unwritable(self.destination, error)

    @staticmethod
    def _unwritable(path: Path, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{path} cannot be written: {error.strerror}",
            f"give a destination (or a STRATA_HOME) in which you can write; look at the rights of {path.parent}",
        )

    def _take_lock(self) -> None:
        self._lock = (self.path / _LOCK_FILE).open("wb")
        if not hasattr(os, "lockf"):  # no advisory locks there: two writers at once are the user's to avoid
            return
        try:
            os.lockf(self._lock.fileno(), os.F_TLOCK, 0)
        except OSError as error:
            self._lock.close()
            self._lock = None
            raise CheckpointError(
                f"another strata process writes {self.destination} at the moment", "wait for it, or stop it"
            ) from error

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _clear(self) -> None:
        """Removes what a killed run left. Folders in it were not written by a run: refused."""
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                raise CheckpointError(f"{self.path} holds a folder ({entry.name})", "look at it and remove it yourself")
            if entry.name != _LOCK_FILE:
                entry.unlink()

    def _remove(self) -> None:
        self._drop_lock()
        shutil.rmtree(self.path, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
