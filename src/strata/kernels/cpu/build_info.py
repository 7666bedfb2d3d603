"""How the native library was compiled, as it says itself: the compiler and the flags that decide its arithmetic.

Lives beside the binding because only it may call the library. It must not judge what it reads.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass

from strata.kernels.cpu.library import declare

__all__ = ["BuildInfo", "build_info"]


@dataclass(frozen=True)
class BuildInfo:
    """``flags``: those that every file was compiled with."""

    compiler: str
    flags: tuple[str, ...]


def build_info() -> BuildInfo:
    """Raises ``EngineError`` if the library was not built."""
    table = json.loads(declare("strata_build_info", returns=ctypes.c_char_p)())
    files = list(table["flags"].values())
    shared = tuple(flag for flag in table["base_flags"] if all(flag in flags for flags in files))
    return BuildInfo(str(table["compiler"]), shared)
