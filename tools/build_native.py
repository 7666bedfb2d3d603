"""Compiles csrc/cpu/*.cpp into src/strata/_native/libstrata_cpu.so, again only what changed.

``--sanitize`` builds another library, build/sanitized/libstrata_cpu.so, whose reads and writes are checked; ``make
test-sanitize`` runs tests with it (STRATA_NATIVE).

Lives in tools because the Makefile and setup.py both call it and the package never does. It needs the standard
library and a C++17 compiler (``CXX``, else g++, clang++, c++) and knows nothing of what the sources compute.

The flags are part of the result: a sum contracted or reassociated by the compiler changes tokens. So every object
is keyed by its flags, the compiler and the contents of all files it includes; the library exports
``strata_build_info()`` (JSON: compiler, base flags, flags by file) and carries the compiler's own record of the
command lines (section .GCC.command.line), which the tests compare.

A file's suffix chooses its instruction set: ``*_avx2.cpp``, ``*_avx512.cpp``, ``*_avxvnni.cpp``; all other files get
the baseline of the architecture, so that the library loads on any x86-64. On other architectures those files are
left out. Every file sees STRATA_HAVE_AVX2 / _AVX512 / _AVXVNNI defined to 1 where the matching files are built in.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "cpu"
OBJECTS = ROOT / "build" / "native"
LIBRARY = ROOT / "src" / "strata" / "_native" / "libstrata_cpu.so"

BASE_FLAGS = (
    "-O3 -std=c++17 -fPIC -ffp-contract=off -fno-fast-math -fno-associative-math -pthread -fvisibility=hidden "
    "-Wall -Wextra -frecord-gcc-switches"
).split()
LINK_FLAGS = ["-shared", "-pthread", "-Wl,--no-undefined"]
# Any finding ends the process. What nobody wrote on a stack is no plausible number. Null pointers and sizes of objects
# are the address sanitizer's to see; checked twice they double the time to compile.
SANITIZE_FLAGS = (
    "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=null,object-size "
    "-fno-sanitize-recover=all -ftrivial-auto-var-init=pattern -Wno-psabi"
).split()
ISA_FLAGS = {
    "avx2": "-mavx2 -mfma -mf16c".split(),
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c -Wno-maybe-uninitialized".split(),
    "avxvnni": "-mavx2 -mfma -mf16c -mavxvnni".split(),
}
LEVELS = set(ISA_FLAGS)


class BuildError(Exception):
    """The library could not be built; the message holds the compiler's own words."""


def find_compiler() -> list[str]:
    """The compiler's command line, from CXX or the first of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: install g++ (Debian: g++, Fedora: gcc-c++, Arch: gcc) or set CXX")


def compiler_version(compiler: list[str]) -> str:
    result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{shlex.join(compiler)} --version failed: {result.stderr.strip()}")
    return result.stdout.splitlines()[0].strip()


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def instruction_set(source: Path) -> str | None:
    """The key of ISA_FLAGS that the file's suffix names, or None for a baseline file."""
    suffix = source.stem.rpartition("_")[2]
    return suffix if suffix in ISA_FLAGS else None


def list_sources() -> list[Path]:
    """Files to compile here, in a fixed order (the order of linking is part of the result)."""
    found = sorted(SOURCES.glob("*.cpp"))
    return [
        source
        for source in found
        if instruction_set(source) is None or (is_x86() and instruction_set(source) in LEVELS)
    ]


def flags_of(source: Path, sources: list[Path]) -> list[str]:
    present = sorted({isa for isa in map(instruction_set, sources) if isa})
    isa = instruction_set(source)
    return [*BASE_FLAGS, *(ISA_FLAGS[isa] if isa else []), *(f"-DSTRATA_HAVE_{name.upper()}=1" for name in present)]


def digest_files(paths: list[Path], *words: str) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        digest.update(str(path).encode() + b"\0")
        digest.update(path.read_bytes() if path.exists() else b"absent")
    return digest.hexdigest()


def read_dependencies(make_rule: Path) -> list[Path]:
    """Files named by a -MMD rule, the source among them; system headers are covered by the compiler's version."""
    text = make_rule.read_text().replace("\\\n", " ").partition(":")[2]
    return [Path(word) for word in shlex.split(text)]


def compile_one(compiler: list[str], version: str, source: Path, flags: list[str]) -> tuple[Path, str, bool]:
    """Compiles one file if its key changed. Returns (object, key, compiled now)."""
    object_path = OBJECTS / f"{source.stem}.o"
    rule, stamp = object_path.with_suffix(".d"), object_path.with_suffix(".key")
    words = [version, *compiler, *flags]
    if object_path.exists() and rule.exists() and stamp.exists():
        dependencies = read_dependencies(rule)
        key = digest_files(dependencies, *words)
        if source in dependencies and stamp.read_text() == key:  # else the checkout was copied from somewhere
            return object_path, key, False
    stamp.unlink(missing_ok=True)
    command = [*compiler, *flags, f"-I{SOURCES}", "-MMD", "-MF", str(rule), "-c", str(source), "-o", str(object_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{source.name} does not compile:\n{result.stderr}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)
    key = digest_files(read_dependencies(rule), *words)
    stamp.write_text(key)
    return object_path, key, True


def write_build_info(version: str, sources: list[Path]) -> Path:
    """Generates the one file that tells the library how it was compiled."""
    info = {
        "compiler": version,
        "base_flags": BASE_FLAGS,
        "flags": {source.name: flags_of(source, sources) for source in sources},
    }
    text = json.dumps(json.dumps(info, sort_keys=True))  # twice: a JSON string literal is also a C string literal
    body = (
        "// Generated by tools/build_native.py.\n"
        'extern "C" __attribute__((visibility("default"))) const char* strata_build_info() {\n'
        f"    return {text};\n}}\n"
    )
    OBJECTS.mkdir(parents=True, exist_ok=True)
    path = OBJECTS / "build_info.cpp"
    if not path.exists() or path.read_text() != body:
        path.write_text(body)
    return path


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """One build at a time in a checkout; a second caller waits and then finds everything built."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            import fcntl
        except ImportError:  # not POSIX: builds are not shared there
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(*, jobs: int | None = None, quiet: bool = False) -> Path:
    """Brings the library up to date and returns its path. Raises BuildError."""
    compiler = find_compiler()
    with exclusive(OBJECTS / "lock"):
        started = time.monotonic()
        version = compiler_version(compiler)
        sources = list_sources()
        flags = {source: flags_of(source, sources) for source in sources}
        info = write_build_info(version, sources)
        flags[info] = BASE_FLAGS
        with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            done = list(pool.map(lambda source: compile_one(compiler, version, source, flags[source]), flags))
        link_key = digest_files([], *LINK_FLAGS, *(key for _, key, _ in done))
        stamp = OBJECTS / "link.key"
        compiled = sum(now for _, _, now in done)
        if LIBRARY.exists() and stamp.exists() and stamp.read_text() == link_key:
            return LIBRARY
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        # A process may have the old library mapped: a new file takes its name, the old one lives on until unmapped.
        fresh = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
        command = [*compiler, *LINK_FLAGS, "-o", str(fresh), *(str(path) for path, _, _ in done), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            fresh.unlink(missing_ok=True)
            raise BuildError(f"the library does not link:\n{result.stderr}")
        os.replace(fresh, LIBRARY)
        stamp.write_text(link_key)
        if not quiet:
            seconds = time.monotonic() - started
            print(f"native library: {compiled} of {len(done)} files compiled with {version}, {seconds:.1f} s")
    return LIBRARY


def choose_sanitized() -> None:
    """From now on ``build`` makes the library with checks, in a folder of its own.

    Of this processor's levels alone: a file of kernels takes a minute to compile so.
    """
    global OBJECTS, LIBRARY, BASE_FLAGS, LINK_FLAGS, LEVELS
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    names = {"avx2": "avx2", "avxvnni": "avx_vnni", "avx512": "avx512_vnni"}
    LEVELS = {level for level, name in names.items() if name in words}
    OBJECTS = ROOT / "build" / "sanitized"
    LIBRARY = OBJECTS / "libstrata_cpu.so"
    BASE_FLAGS = [*BASE_FLAGS, *SANITIZE_FLAGS]
    # Symbols of the runtime come from the process, which loads it before everything else.
    LINK_FLAGS = ["-shared", "-pthread", "-fsanitize=address,undefined"]


def sanitizer_runtime() -> Path:
    """The address sanitizer's library of the compiler in use, to be preloaded. Raises BuildError."""
    compiler = find_compiler()
    result = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    path = Path(result.stdout.strip())
    if result.returncode or not path.is_absolute():
        raise BuildError(f"{shlex.join(compiler)} has no address sanitizer: install libasan, or use g++")
    return path.resolve()


def main() -> int:
    words = sys.argv[1:]
    try:
        if "--sanitizer-runtime" in words:
            print(sanitizer_runtime())
            return 0
        if "--sanitize" in words:
            choose_sanitized()
        build(quiet="--quiet" in words)
    except BuildError as error:
        print(f"strata: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
