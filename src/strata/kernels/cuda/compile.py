"""Machine code of the kernels: compiled for the card at run time, kept on disk, found damaged and made again.

Lives beside the sources. A kernel file is compiled with the headers that it includes by name, with no toolkit and no
other include, and kept in STRATA_HOME/kernels under a key of everything that decides the result: source, headers,
options, compiler, driver and architecture. A file that takes long is compiled in parts (``parts.h``), side by side on
every processor: decision record 0124. It must not know a context: the code is plain bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from strata.errors import ConfigError, EngineError
from strata.files import atomic_write, read_regular
from strata.kernels.cpu.pool import usable_processors
from strata.kernels.cuda.driver import load_nvrtc
from strata.paths import Home, find_home
from strata.progress import bar

__all__ = [
    "ARCHITECTURES",
    "Compiled",
    "KernelSource",
    "compile_kernels",
    "compile_source",
    "compiler_version",
    "count_kept",
    "list_kernels",
    "list_units",
]

logger = logging.getLogger(__name__)
_HERE = Path(__file__).resolve().parent
FOLDERS = (_HERE, _HERE / "prompt", _HERE.parents[1] / "quant")  # of sources and headers; the first one with a name
ARCHITECTURES = (75, 86, 89, 90, 120)  # those that the tests compile for
OPTIONS = ("--std=c++17", "--fmad=false")
MAGIC = b"strata cubin 1\n"
_BEGIN_WORKER = """
import sys
sys.path[:] = sys.argv[1:]  # what this process finds, that one finds
from strata.kernels.cuda.compile_worker import main
main()
"""
_PART = re.compile(rb"^#if STRATA_IN\((\d+)\)", re.MULTILINE)
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A ``.cu`` file and the headers that it includes, directly or not, by the names in their ``#include`` lines.

    ``part``: the one that is compiled, of a file that has parts; None: all of the file.
    """

    name: str
    text: bytes
    headers: dict[str, bytes]
    part: int | None = None

    @classmethod
    def read(cls, name: str) -> KernelSource:
        """``name`` is 'rows' for rows.cu. Raises ``EngineError`` for a file that is not there."""
        paths = [folder / f"{name}.cu" for folder in FOLDERS]
        path = next((path for path in paths if path.is_file()), paths[0])
        try:
            text = path.read_bytes()
        except OSError as error:
            raise EngineError(f"the kernels of {path.name} cannot be read: {error.strerror}", "install again") from None
        headers: dict[str, bytes] = {}
        waiting = _includes(text)
        while waiting:
            header = waiting.pop()
            if header not in headers:
                found = next((folder / header for folder in FOLDERS if (folder / header).is_file()), None)
                if found is None:
                    raise EngineError(f"{path.name} includes {header}, which is not there", "install again")
                headers[header] = found.read_bytes()
                waiting += _includes(headers[header])
        return cls(name, text, dict(sorted(headers.items())))

    @property
    def unit(self) -> str:
        """'rows', or 'rows-1' of the second part of rows.cu."""
        return self.name if self.part is None else f"{self.name}-{self.part}"

    @property
    def defines(self) -> tuple[str, ...]:
        return () if self.part is None else (f"STRATA_PART={self.part}",)

    def parts(self) -> list[KernelSource]:
        """What is compiled apart, in the order in which it stands; the file itself where it has no parts."""
        count = len(set(_PART.findall(self.text)))
        return [replace(self, part=part) for part in range(count)] or [self]

    def key(self, compiler: str, driver: tuple[int, int], architecture: int, defines: Sequence[str] = ()) -> str:
        """SHA-256 of everything that decides the machine code."""
        digest = hashlib.sha256()
        decides = [compiler, f"{driver[0]}.{driver[1]}", f"sm_{architecture}", *OPTIONS, *defines, *self.defines]
        decides.append(self.name)
        parts = [*(word.encode() for word in decides), self.text]
        for name, text in self.headers.items():
            parts += [name.encode(), text]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


@dataclass(frozen=True)
class Compiled:
    """Machine code of one unit: a source file's, or of a part of one. ``origin``: 'kept' (read from disk), or
    'compiled'."""

    file: str
    image: bytes
    origin: str


def list_kernels() -> list[str]:
    """Names of all kernel files."""
    return sorted(path.stem for folder in FOLDERS for path in folder.glob("*.cu"))


def list_units(names: Sequence[str]) -> list[KernelSource]:
    """What is compiled apart of the files ``names``, in the order in which it is begun: longest first.

    Part 0 of a file is its longest (``parts.h``); among files the longest text comes first.
    """
    units = [unit for name in names for unit in KernelSource.read(name).parts()]

    def place(unit: KernelSource) -> tuple[int, int, str]:
        return unit.part or 0, -len(unit.text) - sum(map(len, unit.headers.values())), unit.unit

    return sorted(units, key=place)


def compile_kernels(
    names: Sequence[str],
    architecture: int,
    driver: tuple[int, int],
    home: Home | None = None,
    defines: Sequence[str] = (),
) -> dict[str, Compiled]:
    """Machine code by unit ('linear-0', 'heads'), from disk where it is there whole; compiled on all processors
    otherwise, with a bar on a terminal and a line before and after.

    ``driver`` is the CUDA version that the driver serves, ``defines`` are names that the sources ask for. Raises
    ``ConfigError`` where there is no compiler, ``EngineError`` for what does not compile. A folder that cannot be
    written costs compiling each time, said once. An interruption ends it at once.
    """
    nvrtc = load_nvrtc()
    compiler = compiler_version(nvrtc)
    folder = (home or find_home()).kernels
    found: dict[str, Compiled] = {}
    missing: dict[str, tuple[KernelSource, Path]] = {}
    units = list_units(names)
    for unit in units:
        key = unit.key(compiler, driver, architecture, defines)[:32]
        path = folder / f"{unit.unit}-sm{architecture}-{key}.cubin"
        image = _read_kept(path)
        if image is None:
            missing[unit.unit] = unit, path
        else:
            found[unit.unit] = Compiled(unit.name, image, "kept")
    if not missing:
        return found
    threads, began = min(len(missing), usable_processors()), time.perf_counter()
    told = f"{len(missing)} GPU kernel file{'s' if len(missing) > 1 else ''} for sm_{architecture}"
    logger.info("compiling %s on %d processors, once for this card and driver", told, threads)
    compiling = _Compiling([unit for unit, _ in missing.values()], threads, architecture, defines)
    can_keep = True
    try:
        with bar("GPU kernels", len(missing)) as advance:
            for name, image in compiling.results():
                unit, path = missing[name]
                can_keep = can_keep and _keep(path, image)
                found[name] = Compiled(unit.name, image, "compiled")
                advance(1)
    finally:
        compiling.close()
    logger.info("compiled %s in %.1f s", told, time.perf_counter() - began)
    return {unit.unit: found[unit.unit] for unit in units}


class Compiler(Protocol):
    """What compiles units, one at a time."""

    def compile(self, unit: KernelSource, architecture: int, defines: Sequence[str]) -> bytes: ...
    def close(self) -> None:
        """Ends it, also from another thread while it compiles."""


class InThisProcess:
    """A ``Compiler`` where no process can be started: it cannot be interrupted."""

    def compile(self, unit: KernelSource, architecture: int, defines: Sequence[str]) -> bytes:
        return compile_source(unit, architecture, defines=defines)

    def close(self) -> None:
        """Nothing is held."""


class InWorker:
    """A ``Compiler`` in a process of its own (``compile_worker``). Raises OSError where none can be started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN_WORKER, *(path for path in sys.path if path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def compile(self, unit: KernelSource, architecture: int, defines: Sequence[str]) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "name": unit.name, "text": unit.text.decode(), "part": unit.part, "architecture": architecture,
            "headers": {name: text.decode() for name, text in unit.headers.items()}, "defines": list(defines),
        }  # fmt: skip
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
            image = self._process.stdout.read(answer.get("bytes", 0))
        except (OSError, ValueError):
            answer, image = {}, b""
        if "message" in answer:
            kind = ConfigError if answer["kind"] == "ConfigError" else EngineError
            raise kind(answer["message"], answer["hint"])
        if not image or len(image) != answer["bytes"]:
            raise EngineError(
                f"the process that compiles {unit.name}.cu ended (status {self._process.wait()})",
                "memory may be short: each processor at work takes 200 MB; close other programs, or use --device cpu",
            )
        return image

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def start_compiler() -> Compiler:
    try:
        return InWorker()
    except OSError as error:
        logger.debug("no process to compile in: %s", error)
        return InThisProcess()


class _Compiling:
    """Units begun in order by so many threads, each with a compiler; threads write nothing. Close once."""

    def __init__(self, units: Sequence[KernelSource], threads: int, architecture: int, defines: Sequence[str]) -> None:
        self._count, self._waiting = len(units), deque(units)
        self._architecture, self._defines = architecture, defines
        self._done: queue.SimpleQueue[tuple[str, bytes | BaseException]] = queue.SimpleQueue()
        self._compilers: list[Compiler] = []
        self._threads = [
            threading.Thread(target=self._work, name="strata-compile", daemon=True) for _ in range(threads)
        ]
        self._lock = threading.Lock()
        self._closed = False

    def results(self) -> Iterator[tuple[str, bytes]]:
        """Machine code by unit, as it is done. Raises what a unit raises."""
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # no room for its stack: fewer do it too
                if number == 0:
                    raise
                break
        for _ in range(self._count):
            name, image = self._done.get()
            if isinstance(image, BaseException):
                raise image
            yield name, image

    def close(self) -> None:
        """Ends the compilers, whatever they do, and waits for the threads."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        for compiler in self._compilers:
            compiler.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _start(self) -> Compiler | None:
        with self._lock:  # so that ``close`` ends every one of them
            if self._closed:
                return None
            compiler = start_compiler()
            self._compilers.append(compiler)
            return compiler

    def _work(self) -> None:
        try:
            compiler = self._start()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._done.put(("", error))
            return
        while compiler is not None:
            try:
                unit = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._done.put((unit.unit, compiler.compile(unit, self._architecture, self._defines)))
            except BaseException as error:  # noqa: BLE001 - as above
                self._done.put((unit.unit, error))


def compiler_version(nvrtc: Any) -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def compile_source(
    source: KernelSource, architecture: int, nvrtc: Any | None = None, defines: Sequence[str] = ()
) -> bytes:
    """Machine code for ``sm_<architecture>``. Raises ``EngineError`` with the compiler's first complaint."""
    nvrtc = nvrtc or load_nvrtc()

    def ask(answer: tuple[Any, ...], doing: str) -> Any:
        status, *results = answer
        if int(status) != 0:
            raise EngineError(f"{doing} {source.name}.cu failed: {status.name}")
        return results[0] if results else None

    names = [name.encode() for name in source.headers]
    texts = list(source.headers.values())
    program = ask(
        nvrtc.nvrtcCreateProgram(source.text, f"{source.name}.cu".encode(), len(names), texts, names), "reading"
    )
    options = [f"--gpu-architecture=sm_{architecture}".encode(), *(option.encode() for option in OPTIONS)]
    options += [f"--define-macro={name}".encode() for name in (*defines, *source.defines)]
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status) != 0:
            log = b" " * ask(nvrtc.nvrtcGetProgramLogSize(program), "asking what the compiler says of")
            ask(nvrtc.nvrtcGetProgramLog(program, log), "asking what the compiler says of")
            raise EngineError(f"{source.name}.cu does not compile for sm_{architecture}: {_complaint(log, status)}")
        image: bytes = b" " * ask(nvrtc.nvrtcGetCUBINSize(program), "asking the size of")
        ask(nvrtc.nvrtcGetCUBIN(program, image), "taking the machine code of")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image


def count_kept(architecture: int, driver: tuple[int, int], home: Home) -> tuple[int, int]:
    """(units whose machine code for this card is on disk whole, units in all): files, and parts of long ones."""
    compiler, units = compiler_version(load_nvrtc()), list_units(list_kernels())
    kept = 0
    for unit in units:
        key = unit.key(compiler, driver, architecture)[:32]
        kept += _read_kept(home.kernels / f"{unit.unit}-sm{architecture}-{key}.cubin") is not None
    return kept, len(units)


def _includes(text: bytes) -> list[str]:
    return [name.decode() for name in _INCLUDE.findall(text)]


def _complaint(log: bytes, status: Any) -> str:
    lines = [line.strip() for line in log.rstrip(b"\0 ").decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else str(status.name))


def _read_kept(path: Path) -> bytes | None:
    """The image, or None where there is no whole one."""
    try:
        raw = read_regular(path)
    except OSError:
        return None
    start = len(MAGIC) + 32
    image = raw[start:]
    if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(image).digest() != raw[len(MAGIC) : start]:
        logger.debug("%s is damaged and is compiled again", path.name)
        return None
    return image


def _keep(path: Path, image: bytes) -> bool:
    """False where it cannot be kept, which is said."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            file.write(MAGIC + hashlib.sha256(image).digest() + image)
    except OSError as error:
        logger.info("compiled kernels cannot be kept in %s: %s", path.parent, error.strerror)
        return False
    return True
