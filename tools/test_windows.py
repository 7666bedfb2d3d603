"""Cross-compiles the Windows calls of the memory room with mingw-w64 and runs their test program under wine.

Lives in tools because the Makefile calls it (``make test-windows``). Needs Debian's g++-mingw-w64-x86-64-posix and
wine; without them it says so and ends with status 2. This is not the real system: wine's kernel is not Windows'.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "windows"
BUILD = ROOT / "build" / "windows"
COMPILERS = ("x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-g++")
FLAGS = "-O2 -std=c++17 -Wall -Wextra -static".split()
# (output, sources, flags of its own)
OUTPUTS = (
    ("strata_windows.dll", ("memory_calls.cpp",), ("-shared", "-ldxguid", "-luuid")),
    ("fake_dxgi.dll", ("fake_dxgi.cpp",), ("-shared", "-ldxguid", "-luuid")),
    ("test_memory_calls.exe", ("test_memory_calls.cpp", "memory_calls.cpp"), ("-ldxguid", "-luuid")),
)


def find(names: tuple[str, ...], package: str) -> str:
    """The first of these programs, or an end that names the package to install."""
    for name in names:
        if found := shutil.which(name):
            return found
    print(f"strata: error: {names[0]} is missing: install {package}", file=sys.stderr)
    raise SystemExit(2)


def main() -> int:
    compiler = find(COMPILERS, "g++-mingw-w64-x86-64-posix")
    wine = find(("wine64", "wine"), "wine and wine64")
    BUILD.mkdir(parents=True, exist_ok=True)
    for output, sources, own in OUTPUTS:
        command = [compiler, *FLAGS, "-o", str(BUILD / output), *(str(SOURCES / name) for name in sources), *own]
        if subprocess.run(command, check=False).returncode:
            return 1
    environment = os.environ | {
        "WINEPREFIX": str(BUILD / "wine"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
    }
    program = [wine, str(BUILD / "test_memory_calls.exe")]
    return subprocess.run(program, cwd=BUILD, env=environment, check=False, timeout=300).returncode


if __name__ == "__main__":
    raise SystemExit(main())
