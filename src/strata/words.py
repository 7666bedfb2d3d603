"""How lines for people are worded: a number with its noun, and the name under which this program was started.

Lives on top because every room writes such lines. Knows no room.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

__all__ = ["count_of", "program", "with_program"]

# "strata" where a command follows: neither the package's own name in a sentence nor the end of a path.
_COMMAND = re.compile(
    r"(?<![\w./-])strata (?=(?:--help|demo|run|chat|serve|verify|bench|plan|doctor|inspect|pack|export|list|rm)\b)"
)


def count_of(number: int, noun: str) -> str:
    """'1 token', '2 tokens', '1,024 tokens'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def program() -> str:
    """What to type for ``strata``: the word where the shell finds it, else the path of the running script, as seen
    from the current folder where it lies below that."""
    if shutil.which("strata"):
        return "strata"
    script = Path(sys.argv[0] if sys.argv else "").absolute()
    if script.name != "strata" or not os.access(script, os.X_OK) or not script.is_file():
        return "python -m strata" if script.name == "__main__.py" else "strata"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def with_program(text: str) -> str:
    """``text`` with each command in it as it can be typed here."""
    if not _COMMAND.search(text):
        return text
    name = program()
    return _COMMAND.sub(lambda _: f"{name} ", text)
