"""Loads the native library and says which instruction set is in force.

Lives here because every native kernel is reached through it; each module declares the symbols it calls
itself, with ``declare``. It must not know what any kernel computes. ``STRATA_ISA`` (scalar, avx2, avxvnni,
avx512) forces a level; all levels give the same bits. ``STRATA_NATIVE`` names another library: the one with checks that
``make test-sanitize`` builds.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from strata.errors import ConfigError, EngineError

__all__ = ["ISA_LEVELS", "available_isa_levels", "check", "declare", "isa", "library", "select_isa"]

ISA_LEVELS = ("scalar", "avx2", "avxvnni", "avx512")
# Statuses of csrc/cpu/status.h that a user can do something about.
_HINTS = {
    5: "restore the file, or fetch or pack the model again, then start Strata again",
    6: "start Strata again; if it comes back, report it with this line",
}
_PATH = Path(__file__).resolve().parents[2] / "_native" / "libstrata_cpu.so"


@cache
def library() -> ctypes.CDLL:
    """The native library, loaded once. Raises ``EngineError`` if it was not built, ``ConfigError`` for a bad
    ``STRATA_ISA``."""
    chosen = os.environ.get("STRATA_NATIVE", "").strip()
    path = Path(chosen) if chosen else _PATH
    if not path.exists():
        hint = "unset STRATA_NATIVE" if chosen else "run `make build`, or reinstall the package"
        raise EngineError(f"the native library {chosen or path.name} is not built", hint)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(
            f"the native library {path.name} cannot be loaded: {error}", "rebuild it on this machine with `make build`"
        ) from error
    loaded.strata_last_error.restype = ctypes.c_char_p
    forced = os.environ.get("STRATA_ISA", "").strip().lower()
    if forced:
        _select(loaded, forced)
    return loaded


def declare(name: str, *arguments: object, returns: object = ctypes.c_int) -> ctypes._NamedFuncPointer:
    """The exported function ``name`` with its argument types declared. It releases the GIL while it runs."""
    function = getattr(library(), name)
    function.argtypes = list(arguments)
    function.restype = returns
    return function  # type: ignore[no-any-return]


def check(status: int) -> None:
    """Raises ``EngineError`` with the native call's own words unless ``status`` is 0. Call it on the same thread."""
    if status:
        words = library().strata_last_error() or b"a native call failed"
        raise EngineError(words.decode("utf-8", "replace"), _HINTS.get(status, ""))


def isa() -> str:
    """The level in force, one of ``ISA_LEVELS``."""
    return ISA_LEVELS[library().strata_isa_level()]


def available_isa_levels() -> tuple[str, ...]:
    """The levels that this processor runs, slowest first."""
    loaded = library()
    return tuple(name for level, name in enumerate(ISA_LEVELS) if loaded.strata_isa_available(level))


def select_isa(name: str) -> None:
    """Puts a level in force for later calls; not while another thread is in one. Raises ``ConfigError``."""
    _select(library(), name)


def _select(loaded: ctypes.CDLL, name: str) -> None:
    if name not in ISA_LEVELS:
        raise ConfigError(f"STRATA_ISA={name!r} is no instruction set level", f"use one of {', '.join(ISA_LEVELS)}")
    if loaded.strata_isa_select(ISA_LEVELS.index(name)):
        best = ISA_LEVELS[loaded.strata_isa_best()]
        raise ConfigError(f"this processor does not run {name}", f"leave STRATA_ISA unset, or use {best}")
