"""Kernel files compiled for the CPU by g++: one shared library a file, kept in build/emulator by what decides it.

Lives in the tests: a user's machine never needs it. A source is rewritten in three places that have no counterpart in
C++ (shared variables, the dynamic shared array, the prmt instruction), read by the preprocessor so that entries made
by macros are seen, and given one C function an entry that takes its arguments as addresses.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from strata.kernels.cuda.compile import KernelSource

__all__ = ["EmulatedSource", "load"]

FOLDER = Path(__file__).resolve().parent
CACHE = FOLDER.parents[1] / "build" / "emulator"
WORDS = FOLDER / "cuda_words.h"
OPTIONS = ["-std=c++17", "-O1", "-g0", "-fPIC", "-shared", "-ffp-contract=off", "-fno-threadsafe-statics", "-w"]
SECONDS = 240

_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\[\];")
_SHARED = re.compile(r"__shared__\s+([\w:]+(?:\s+(?:int|long|char|short))*)\s+([^;]+);")
_PRMT = re.compile(r'asm\("prmt\.b32 %0, %1, %2, (0x[0-9A-Fa-f]+);" : "=r"\((\w+)\) : "r"\((\w+)\), "r"\((\w+)\)\);')
_ENTRY = re.compile(r'extern\s+"C"\s+(?:__attribute__\(\(\w+\)\)\s+)*void\s+(\w+)\s*\(')


def rewrite(text: str) -> str:
    """CUDA text that g++ reads, given cuda_words.h."""

    def shared(match: re.Match[str]) -> str:
        kind, names = match.group(1), match.group(2)
        told = []
        for name in re.split(r",(?![^\[]*\])", names):
            bare = name.split("[")[0].strip()
            told.append(f"static emulated::Shared shared_{bare}(&{bare}, sizeof {bare});")
        return f"alignas(16) static {kind} {names}; {' '.join(told)}"

    text = _DYNAMIC.sub(r"auto* const \2 = reinterpret_cast<\1*>(emulated::dynamic);", text)
    text = _SHARED.sub(shared, text)
    return _PRMT.sub(r"\2 = strata_emulated_prmt(\3, \4, \1);", text)


class EmulatedSource:
    """The entries of one compiled kernel file."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library
        self.name = name
        library.strata_emulated_message.restype = ctypes.c_char_p

    def entry(self, name: str) -> ctypes._NamedFuncPointer:
        """The C function of a kernel. Raises ``AttributeError`` for an entry that the file does not have."""
        return self._library[f"emulated_{name}"]

    def set_late(self, words: Sequence[tuple[int, int]]) -> None:
        """Addresses of int32 words whose present value the launches from now on see only once they have waited for the
        launch before, and what they see until then."""
        addresses = (ctypes.c_void_p * max(1, len(words)))(*[address for address, _ in words])
        before = (ctypes.c_int * max(1, len(words)))(*[value for _, value in words])
        self._library.strata_emulated_late(len(words), addresses, before)

    def message(self) -> str:
        text: bytes = self._library.strata_emulated_message()
        return text.decode()


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[:4000]}"
    return done.stdout


def _options() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    has_fma = cpuinfo.exists() and re.search(r"^flags.*\bfma\b", cpuinfo.read_text(), re.MULTILINE)
    return [*OPTIONS, *(["-mfma"] if has_fma else [])]  # a fused multiply-add is a call of the C library without it


def load_source(source: KernelSource) -> EmulatedSource:
    """Compiles what was not compiled before. Two processes that want one file wait for each other."""
    options = _options()
    digest = hashlib.sha256()
    for part in (
        source.text,
        *source.headers.values(),
        WORDS.read_bytes(),
        Path(__file__).read_bytes(),
        " ".join(options).encode(),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"{source.name}-{digest.hexdigest()[:24]}.so"
    with (CACHE / f"{source.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(source, options, path)
    return EmulatedSource(ctypes.CDLL(str(path)), source.name)


def _compile(source: KernelSource, options: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, header in source.headers.items():
            (Path(folder) / name).write_text(rewrite(header.decode()))
        whole = f'#include "{WORDS}"\n#line 1 "{source.name}.cu"\n{rewrite(source.text.decode())}'
        spread = _run(["g++", *options, "-I", folder, "-E", "-x", "c++", "-"], whole)
    names = _ENTRY.findall(spread)
    assert names, f"{source.name}.cu has no entries"
    taken = "const char* letters, const int* sizes, void** arguments, const int* grid, int block, int shared, int order"
    calls = [
        f'extern "C" int emulated_{name}({taken}) {{'
        f" return emulated::launch(&{name}, letters, sizes, arguments, grid, block, shared, order); }}"
        for name in names
    ]
    part = path.with_suffix(".part")
    _run(["g++", *options, "-fpreprocessed", "-x", "c++", "-", "-o", str(part)], spread + "\n" + "\n".join(calls))
    for old in CACHE.glob(f"{source.name}-*.so"):
        old.unlink()
    part.rename(path)


@cache
def load(name: str) -> EmulatedSource:
    """``name`` is 'rows' for the package's rows.cu."""
    return load_source(KernelSource.read(name))
