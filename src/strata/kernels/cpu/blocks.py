"""The sizes at which native kernels change their path, asked of the library so that they are written once.

Lives here because it binds native code. What is made of them (prompt lengths of ``strata verify``) is the caller's
matter.
"""

from __future__ import annotations

import ctypes

from strata.kernels.cpu.library import declare

__all__ = ["row_blocks"]


def row_blocks() -> dict[str, int]:
    """Name in ``csrc/cpu`` -> size of every block of rows (of ``kSplit``: of positions), of the level in force."""
    ask = declare("strata_block", ctypes.c_int, ctypes.POINTER(ctypes.c_int64), returns=ctypes.c_char_p)
    found: dict[str, int] = {}
    size = ctypes.c_int64()
    while name := ask(len(found), ctypes.byref(size)):
        found[name.decode()] = size.value
    return found
