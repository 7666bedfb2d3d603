"""Atomic writes: the old file or the whole new one, at every moment and after every failure."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.files import atomic_write, open_regular, read_regular
from tests.patience import PATIENCE_S


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
    result = subprocess.run([sys.executable, "-c", code, str(path)], timeout=PATIENCE_S, check=False)
    assert result.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert all(one == path or one.name.endswith(".partial") for one in tmp_path.iterdir())


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_bytes(b"abc" * 100_000)
    link.symlink_to(path)
    assert read_regular(link) == b"abc" * 100_000
    assert read_regular(path, 300_000) == b"abc" * 100_000
    with pytest.raises(OSError, match=r"holds more than 299,999 bytes") as caught:
        read_regular(path, 299_999)
    assert caught.value.errno == errno.EFBIG
    descriptor = open_regular(path)
    try:
        assert os.pread(descriptor, 3, 3) == b"abc"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("pipe", "a named pipe, not a file"), ("endless", "a device, not a file"), ("folder", "a folder, not a file")],
)
def test_what_is_no_regular_file_is_named_at_once(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=words) as caught:
        read_regular(path)
    assert caught.value.filename == str(path)
    assert caught.value.strerror == f"it is {words}"
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_file_that_tells_no_size_is_read_to_its_end() -> None:
    assert read_regular("/proc/self/limits").startswith(b"Limit")
