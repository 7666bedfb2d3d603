"""Machine code of the kernels: compiled for the card at run time, kept on disk, found damaged and made again.

Lives beside the sources. A kernel file is compiled with the headers that it includes by name, with no toolkit and no
other include, and kept in STRATA_HOME/kernels under a key of everything that decides the result: source, headers,
options, compiler, driver and architecture. It must not know a context: the code is plain bytes.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import EngineError
from strata.files import atomic_write
from strata.kernels.cuda.driver import load_nvrtc
from strata.paths import Home, find_home

__all__ = [
    "ARCHITECTURES",
    "Compiled",
    "KernelSource",
    "compile_kernels",
    "compile_source",
    "compiler_version",
    "count_kept",
    "list_kernels",
]

logger = logging.getLogger(__name__)
_HERE = Path(__file__).resolve().parent
FOLDERS = (_HERE, _HERE / "prompt", _HERE.parents[1] / "quant")  # of sources and headers; the first one with a name
ARCHITECTURES = (75, 86, 89, 90, 120)  # those that the tests compile for
OPTIONS = ("--std=c++17", "--fmad=false")
MAGIC = b"strata cubin 1\n"
MOST_THREADS = 4
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A ``.cu`` file and the headers that it includes, directly or not, by the names in their ``#include`` lines."""

    name: str
    text: bytes
    headers: dict[str, bytes]

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

    def key(self, compiler: str, driver: tuple[int, int], architecture: int, defines: Sequence[str] = ()) -> str:
        """SHA-256 of everything that decides the machine code."""
        digest = hashlib.sha256()
        decides = [compiler, f"{driver[0]}.{driver[1]}", f"sm_{architecture}", *OPTIONS, *defines, self.name]
        parts = [*(word.encode() for word in decides), self.text]
        for name, text in self.headers.items():
            parts += [name.encode(), text]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


@dataclass(frozen=True)
class Compiled:
    """Machine code of one source. ``origin``: 'kept' (read from disk), or 'compiled'."""

    name: str
    image: bytes
    origin: str


def list_kernels() -> list[str]:
    """Names of all kernel files."""
    return sorted(path.stem for folder in FOLDERS for path in folder.glob("*.cu"))


def compile_kernels(
    names: list[str],
    architecture: int,
    driver: tuple[int, int],
    home: Home | None = None,
    defines: Sequence[str] = (),
) -> dict[str, Compiled]:
    """Machine code by name, from disk where it is there whole; compiled by a few threads otherwise.

    ``driver`` is the CUDA version that the driver serves, ``defines`` are names that the sources ask for. Raises
    ``ConfigError`` where there is no compiler, ``EngineError`` for what does not compile. A folder that cannot be
    written costs compiling each time, said once.
    """
    nvrtc = load_nvrtc()
    compiler = compiler_version(nvrtc)
    folder = (home or find_home()).kernels

    def get(name: str) -> Compiled:
        source = KernelSource.read(name)
        path = folder / f"{name}-sm{architecture}-{source.key(compiler, driver, architecture, defines)[:32]}.cubin"
        image = _read_kept(path)
        if image is not None:
            return Compiled(name, image, "kept")
        image = compile_source(source, architecture, nvrtc, defines)
        _keep(path, image)
        return Compiled(name, image, "compiled")

    with ThreadPoolExecutor(min(MOST_THREADS, max(1, len(names)))) as threads:
        found = list(threads.map(get, names))
    compiled = [one.name for one in found if one.origin == "compiled"]
    if compiled:
        logger.debug("compiled for sm_%d: %s", architecture, ", ".join(compiled))
    return {one.name: one for one in found}


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
    options += [f"--define-macro={name}".encode() for name in defines]
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
    """(kernel files whose machine code for this card is on disk whole, kernel files in all)."""
    compiler, names = compiler_version(load_nvrtc()), list_kernels()
    kept = 0
    for name in names:
        key = KernelSource.read(name).key(compiler, driver, architecture)[:32]
        kept += _read_kept(home.kernels / f"{name}-sm{architecture}-{key}.cubin") is not None
    return kept, len(names)


def _includes(text: bytes) -> list[str]:
    return [name.decode() for name in _INCLUDE.findall(text)]


def _complaint(log: bytes, status: Any) -> str:
    lines = [line.strip() for line in log.rstrip(b"\0 ").decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else str(status.name))


def _read_kept(path: Path) -> bytes | None:
    """The image, or None where there is no whole one."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + 32
    image = raw[start:]
    if raw[: len(MAGIC)] != MAGIC or hashlib.sha256(image).digest() != raw[len(MAGIC) : start]:
        logger.debug("%s is damaged and is compiled again", path.name)
        return None
    return image


def _keep(path: Path, image: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            file.write(MAGIC + hashlib.sha256(image).digest() + image)
    except OSError as error:
        logger.info("compiled kernels cannot be kept in %s: %s", path.parent, error.strerror)
