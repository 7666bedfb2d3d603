"""Atomic writes: the old file or the whole new one, at every moment and after every failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.files import atomic_write


def test_new_content_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as handle:
        handle.write(b"new")
        handle.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_text(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "x.txt", "w", durable=False) as handle:
        handle.write("größer")
    assert (tmp_path / "x.txt").read_bytes() == "größer".encode()
    with pytest.raises(ValueError, match="mode 'a'"), atomic_write(tmp_path / "y", "a"):
        pass


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_write(path) as handle:
            handle.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "x") as handle:
        handle.write(b"x")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    code = (
        "import os, signal, sys\n"
        "from strata.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as handle:\n"
        "    handle.write(b'half'); handle.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert all(one == path or one.name.endswith(".partial") for one in tmp_path.iterdir())
