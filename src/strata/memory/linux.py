"""The Linux calls of the memory room: mappings, huge pages, locking, limits, and how much RAM there is.

Lives here because this room alone knows the operating system, and this file alone knows Linux. Everything it
reads of the machine is read below ``root``, so that a test hands it a machine of its own. It must not know
what the memory is used for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.files import open_regular
from strata.memory.limits import Advice, LockRefused, MemoryLimit

__all__ = [
    "HAS_HUGE_PAGES",
    "PAGE_BYTES",
    "Advice",
    "FileMap",
    "LockRefused",
    "MemoryLimit",
    "Region",
    "address_space_limit",
    "advise",
    "cpu_quota",
    "direct_read_flag",
    "drop_file_cache",
    "is_cached",
    "lock_pages",
    "locked_limit",
    "make_writable",
    "map_file",
    "map_region",
    "memory_limits",
    "open_direct",
    "pin_rooms",
    "process_memory",
    "read_ahead",
    "read_ram",
    "touch_pages",
    "unlock_pages",
    "usable_cpus",
]

PAGE_BYTES = mmap.PAGESIZE
# Of pages that are touched at once: with 32 MiB a thread that computed weights beside two that touch waited up to a
# tenth of a second for each piece of memory that it took or gave back (cpu2).
TOUCH_STEP = 4 << 20
HAS_HUGE_PAGES = True  # memory is made of them where ``map_region`` is asked for it
MLOCK_ONFAULT = 1
UNLIMITED = 1 << 60  # cgroup v1 writes its "no limit" as a page-rounded 2^63

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_ADVICE: dict[Advice, int] = {"huge": 14, "will_need": 3}


class Region:
    """Anonymous memory of this process; address and size are whole pages. Zero until written. Freed once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._map: mmap.mmap | None = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def free(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class FileMap:
    """A file mapped for reading: its pages are the page cache's own. Freed once."""

    def __init__(self, path: Path) -> None:
        self._bytes: NDArray[np.uint8] | None = None
        self.address = 0
        with os.fdopen(open_regular(path), "rb") as handle:
            self.nbytes = os.fstat(handle.fileno()).st_size
            if self.nbytes:  # an empty file has nothing to map
                mapped = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                self._bytes = np.frombuffer(mapped, np.uint8)  # keeps the mapping, and knows its address
                self.address = self._bytes.ctypes.data

    def free(self) -> None:
        self._bytes = None


def map_region(nbytes: int, *, huge_pages: bool = False) -> Region:
    """Reserves memory without touching it. Raises ``MemoryError`` when the address space or a limit says no."""
    try:
        region = Region(nbytes)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes of memory: {error.strerror}") from error
    if huge_pages:
        advise(region.address, region.nbytes, "huge")
    return region


def map_file(path: Path) -> FileMap:
    """Maps a whole file. Raises ``MemoryError`` where it is memory that is short, ``OSError`` for the file."""
    try:
        return FileMap(path)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"mapping {path.name}: {error.strerror}") from error
        raise


def advise(address: int, nbytes: int, advice: Advice) -> bool:
    """Tells the kernel how the pages of a range will be used; False where it does not know the advice."""
    first = address // PAGE_BYTES * PAGE_BYTES
    return bool(_libc.madvise(first, address + nbytes - first, _ADVICE[advice]) == 0)


def touch_pages(address: int, nbytes: int) -> None:
    """Makes the pages exist, as zeros, without the interpreter's lock. Only for memory that nobody has written."""
    from strata.kernels.cpu.library import declare  # here: whoever opens a card early loads no library

    number = ctypes.c_uint64
    declare("strata_touch_pages", number, number, number, returns=ctypes.c_int64)(address, nbytes, TOUCH_STEP)


def make_writable(address: int, nbytes: int) -> None:
    """Lets a private read-only mapping be written: the written pages become this process's own copies."""
    first = address // PAGE_BYTES * PAGE_BYTES
    if _libc.mprotect(first, address + nbytes - first, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page of an open file at ``offset`` is in the page cache; True where the system does not say."""
    page = bytearray(PAGE_BYTES)
    try:
        return os.preadv(descriptor, [page], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_ahead(descriptor: int, offset: int, nbytes: int) -> bool:
    """Has a part of an open file read into the page cache, and waits for nothing but room in the drive's queue."""
    try:
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
    except OSError:
        return False
    return True


def lock_pages(address: int, nbytes: int) -> None:
    """Keeps whole pages in RAM from their first touch on. Raises ``LockRefused``; then nothing of the range is locked.

    Locking on touch leaves the zeroing of fresh pages to the threads that fill them; mlock does it alone, and took
    9 s a GiB for huge pages in a fragmented memory.
    """
    if _libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MLOCK_ONFAULT) == 0:
        return
    if ctypes.get_errno() in (errno.ENOSYS, errno.EINVAL) and _libc.mlock(address, nbytes) == 0:
        return
    error = ctypes.get_errno()
    _libc.munlock(address, nbytes)
    limit = locked_limit()
    words = os.strerror(error)
    raise LockRefused(words if limit is None else f"{words}, RLIMIT_MEMLOCK is {limit / 2**20:.1f} MiB")


def unlock_pages(address: int, nbytes: int) -> None:
    _libc.munlock(address, nbytes)


def locked_limit() -> int | None:
    """Bytes that a process without CAP_IPC_LOCK may lock; None when there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def address_space_limit() -> int | None:
    """Bytes that this process may map; None when there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def read_ram(root: Path = Path("/")) -> tuple[int, int]:
    """(all RAM, RAM that programs can still take) in bytes, as the kernel says, before any limit."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def process_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(bytes of RAM that this process has now, at most since its start); None where the kernel does not say."""
    fields = dict(line.split(":", 1) for line in _read_lines(root / "proc/self/status") if ":" in line)
    if not {"VmRSS", "VmHWM"} <= set(fields):
        return None
    now, most = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Every memory limit of this process's control groups (version 1 and 2), innermost first."""
    return [*_limits_v2(root), *_limits_v1(root)]


def _limits_v2(root: Path) -> Iterator[MemoryLimit]:
    for folder in _group_folders(root, controller=""):
        used = _read_number(folder / "memory.current")
        cache = _read_stat(folder / "memory.stat", "inactive_file")
        for name in ("memory.max", "memory.high"):
            limit = _read_number(folder / name)
            if limit is not None and limit < UNLIMITED:
                yield MemoryLimit(f"cgroup {name}", limit, max(0, (used or 0) - cache))


def _limits_v1(root: Path) -> Iterator[MemoryLimit]:
    for folder in _group_folders(root, controller="memory"):
        limit = _read_number(folder / "memory.limit_in_bytes")
        used = _read_number(folder / "memory.usage_in_bytes")
        cache = _read_stat(folder / "memory.stat", "total_inactive_file")
        if limit is not None and limit < UNLIMITED:
            yield MemoryLimit("cgroup memory.limit_in_bytes", limit, max(0, (used or 0) - cache))
        # The least of all ancestors, those above a container's mount too, whose own use it does not show.
        above = _read_stat(folder / "memory.stat", "hierarchical_memory_limit")
        if 0 < above < min(UNLIMITED, UNLIMITED if limit is None else limit):
            yield MemoryLimit("cgroup hierarchical_memory_limit", above, max(0, (used or 0) - cache))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the control groups grant, the smallest of them; None when unlimited."""
    grants = []
    for folder in _group_folders(root, controller=""):
        words = _read_words(folder / "cpu.max")
        if len(words) == 2 and words[0].isdigit():
            grants.append(int(words[0]) / int(words[1]))
    for folder in _group_folders(root, controller="cpu"):
        quota, period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            grants.append(quota / period)
    return min(grants) if grants else None


def pin_rooms() -> tuple[int, ...]:
    """For each display adapter, the bytes that may be page-locked before its driver slows down: Linux has no such
    segment."""
    return ()


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def direct_read_flag() -> int:
    """The flag of ``os.open`` that reads past the page cache; offset, size and address must be whole pages."""
    return os.O_DIRECT


def open_direct(path: Path) -> int | None:
    """A descriptor whose reads go past the page cache; None where the file system refuses that, at once or later."""
    try:
        descriptor = open_regular(path, os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL and path.is_file():  # not for being a pipe or a device
            return None
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def drop_file_cache(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _group_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's group for a version 1 controller, or of version 2 for ``""``, up to the mount."""
    path = None
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            path = group
    if path is None:
        return []
    mounts = list(_group_mounts(root, controller))
    # Of several mounts the one that shows the most ancestors.
    holding = [(inner, folder) for top, folder in mounts if (inner := _below(path, top)) is not None]
    if holding:
        inner, mount = max(holding, key=lambda one: len(one[0]))
    elif mounts:
        inner, mount = "", mounts[0][1]  # the group is seen from inside a container: its folder is the mount itself
    else:
        return []
    leaf = mount / inner
    return [folder for folder in (leaf, *leaf.parents) if folder == mount or mount in folder.parents]


def _group_mounts(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """(the group that is mounted, where) of every mount of the controller."""
    for line in _read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        version = kind == "cgroup2" if not controller else kind == "cgroup" and controller in _last(options).split(",")
        if version:
            top, place = before.split(" ")[3:5]
            yield top, root / place.lstrip("/")


def _last(options: str) -> str:
    return options.split(" ")[-1]


def _below(path: str, top: str) -> str | None:
    """``path`` from ``top`` on; None where it does not lie there. ``/a/bc`` does not lie below ``/a/b``."""
    top = top.rstrip("/")
    if path != top and not path.startswith(f"{top}/"):
        return None
    return path[len(top) :].strip("/")


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_words(path: Path) -> list[str]:
    lines = _read_lines(path)
    return lines[0].split() if lines else []


def _read_number(path: Path) -> int | None:
    words = _read_words(path)
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    for line in _read_lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
