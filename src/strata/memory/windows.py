"""The Windows calls of the memory room, through ``strata_windows.dll`` (``csrc/windows/memory_calls.h``).

Lives here because this file alone knows Windows; it offers the same names as ``linux.py``. Marked: never run on the
real system. The calls themselves are cross-compiled and run under wine by ``make test-windows``.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from strata.errors import EngineError
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

PAGE_BYTES = 4096
HAS_HUGE_PAGES = False
ERROR_NOT_FOUND = 1168
_NOT_ENOUGH = (8, 14, 1455)  # not enough memory, out of memory, the paging file is too small
_PATH = Path(__file__).resolve().parents[1] / "_native" / "strata_windows.dll"


@cache
def _library() -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(_PATH))
    except OSError as error:
        raise EngineError(f"{_PATH.name} cannot be loaded: {error}", "reinstall the package") from error
    address, size = ctypes.c_void_p, ctypes.c_size_t
    for name, arguments in {
        "ram": (address, address),
        "cpus": (address,),
        "take": (size, address),
        "free": (address,),
        "lock": (address, size),
        "unlock": (address, size),
        "prefetch": (address, size),
        "map": (ctypes.c_wchar_p, address, address),
        "unmap": (address,),
        "adapter_budget": (ctypes.c_wchar_p, ctypes.c_uint32, address, address),
    }.items():
        getattr(loaded, f"strata_windows_{name}").argtypes = arguments
    return loaded


def _words(number: int) -> str:
    return f"Windows error {number}"


class Region:
    """Zeroed memory of this process; address and size are whole pages. Freed once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        address = ctypes.c_void_p()
        number = _library().strata_windows_take(self.nbytes, ctypes.byref(address))
        if number:
            raise MemoryError(f"{nbytes} bytes of memory: {_words(number)}")
        self.address = int(address.value or 0)

    def free(self) -> None:
        if self.address:
            _library().strata_windows_free(self.address)
            self.address = 0


class FileMap:
    """A file mapped for reading. Freed once."""

    def __init__(self, path: Path) -> None:
        address, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        number = _library().strata_windows_map(str(path), ctypes.byref(address), ctypes.byref(nbytes))
        if number in _NOT_ENOUGH:
            raise MemoryError(f"mapping {path.name}: {_words(number)}")
        if number:
            raise OSError(number, _words(number))
        self.address, self.nbytes = int(address.value or 0), nbytes.value

    def free(self) -> None:
        if self.address:
            _library().strata_windows_unmap(self.address)
            self.address = 0


def map_region(nbytes: int, *, huge_pages: bool = False) -> Region:
    """Takes memory. Large pages need a right that programs seldom have, so ``huge_pages`` asks for nothing here."""
    return Region(nbytes)


def map_file(path: Path) -> FileMap:
    """Maps a whole file. Raises ``MemoryError`` where it is memory that is short, ``OSError`` for the file."""
    return FileMap(path)


def advise(address: int, nbytes: int, advice: Advice) -> bool:
    """Only reading ahead is known to Windows; False for other advice."""
    return advice == "will_need" and _library().strata_windows_prefetch(address, nbytes) == 0


def touch_pages(address: int, nbytes: int) -> None:
    """Makes the pages exist, as zeros. Only for memory that nobody has written."""
    ctypes.memset(address, 0, nbytes)


def make_writable(address: int, nbytes: int) -> None:
    """Mapped files stay read-only here: damage on purpose is for systems with private mappings."""
    raise OSError("mapped files cannot be made writable on Windows")


def read_ahead(descriptor: int, offset: int, nbytes: int) -> bool:
    """Windows takes no such hint for a file that is not mapped."""
    return False


def address_space_limit() -> int | None:
    """A process has none here."""
    return None


def is_cached(descriptor: int, offset: int) -> bool:
    """Windows does not say."""
    return True


def lock_pages(address: int, nbytes: int) -> None:
    """Keeps whole pages in the working set (VirtualLock). Raises ``LockRefused``."""
    number = _library().strata_windows_lock(address, nbytes)
    if number:
        raise LockRefused(_words(number))


def unlock_pages(address: int, nbytes: int) -> None:
    _library().strata_windows_unlock(address, nbytes)


def locked_limit() -> int | None:
    """None: the working set is raised by what is locked."""
    return None


def read_ram(root: Path = Path("/")) -> tuple[int, int]:
    """(all RAM, RAM that programs can still take) in bytes, under the job's limit. ``root`` is unused."""
    total, available = ctypes.c_uint64(), ctypes.c_uint64()
    number = _library().strata_windows_ram(ctypes.byref(total), ctypes.byref(available))
    if number:
        raise EngineError(f"the system does not tell its memory: {_words(number)}", "give --ram-gib")
    return total.value, available.value


class _ProcessMemory(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("page_faults", ctypes.c_uint32),
        ("most", ctypes.c_size_t),
        ("now", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 6),
    )


def process_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(bytes of the working set now, at most since the start); None where the system does not say."""
    try:
        kernel = ctypes.CDLL("kernel32.dll")
    except OSError:
        return None
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    found = _ProcessMemory(ctypes.sizeof(_ProcessMemory))
    answered = kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(found), found.size)
    return (found.now, found.most) if answered else None


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """None besides the job's, which ``read_ram`` applies."""
    return []


def cpu_quota(root: Path = Path("/")) -> float | None:
    return None


def usable_cpus() -> int:
    count = ctypes.c_uint32()
    number = _library().strata_windows_cpus(ctypes.byref(count))
    return (os.cpu_count() or 1) if number else count.value


def direct_read_flag() -> int:
    """Unbuffered reads are no flag of the C library's open here."""
    return 0


def open_direct(path: Path) -> int | None:
    """None: unbuffered reads are no flag of the C library's open here."""
    return None


def drop_file_cache(descriptor: int) -> None:
    """There is no call for it."""


def pin_rooms() -> tuple[int, ...]:
    """For each display adapter, the bytes of its shared-memory budget that this process does not use yet."""
    rooms = []
    budget, used = ctypes.c_uint64(), ctypes.c_uint64()
    for index in range(16):
        number = _library().strata_windows_adapter_budget("dxgi.dll", index, ctypes.byref(budget), ctypes.byref(used))
        if number:
            break
        rooms.append(max(0, budget.value - used.value))
    return tuple(rooms)
