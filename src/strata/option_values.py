"""How an option's text becomes a value and back: one parser per kind of value.

Lives on top, beside ``config.py``, because every origin (command line, environment, file, Python) uses the same
parsers. It knows no option by name. A parser raises ``ValueError`` saying what is expected; it never guesses.
For every value v of a kind, ``parse(format_value(v)) == v``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

__all__ = [
    "ALL",
    "AUTO",
    "MOST_GIB",
    "NONE",
    "All",
    "Auto",
    "Parser",
    "Prefill",
    "choice",
    "device",
    "format_value",
    "gib",
    "or_word",
    "parse_kv",
    "parse_path",
    "parse_prefill",
    "parse_switch",
    "parse_text",
    "real",
    "whole",
]

Auto: TypeAlias = Literal["auto"]
All: TypeAlias = Literal["all"]
AUTO: Final = "auto"
ALL: Final = "all"
NONE: Final = "none"
Parser: TypeAlias = Callable[[str], object]

DEFAULT_CHUNK_ROWS = 8192
MOST_GIB = 1 << 20  # a PiB: more than any PC has, and its bytes are exact in every type that counts them
MOST_WHOLE = 2**63 - 1  # what native code and files hold; of numbers without a bound of their own

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Prefill:
    """Rows of a prompt chunk: exactly ``rows``, or chosen by the planner up to ``rows`` when ``is_auto``."""

    rows: int = DEFAULT_CHUNK_ROWS
    is_auto: bool = True

    def __str__(self) -> str:
        if not self.is_auto:
            return str(self.rows)
        return AUTO if self.rows == DEFAULT_CHUNK_ROWS else f"{AUTO}:{self.rows}"


def parse_text(text: str) -> str:
    if not text.strip():
        raise ValueError("some text")
    return text


def parse_path(text: str) -> Path:
    path = Path(parse_text(text))
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("a path in full: there is no home folder of that name") from None


def parse_switch(text: str) -> bool:
    """1/0, true/false, yes/no, on/off; nothing else, and never an empty word."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0 (also true, false, yes, no, on, off)")


def whole(low: int, high: int | None = None) -> Parser:
    """A whole number in [low, high]."""
    words = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse(text: str) -> int:
        digits = text.strip()
        if not _WHOLE.fullmatch(digits):
            raise ValueError(words)
        value = int(digits) if len(digits) < 100 else MOST_WHOLE + 1  # Python refuses to read thousands of digits
        if value > MOST_WHOLE and high is None:
            raise ValueError(f"{words}, and at most {MOST_WHOLE}")
        if value < low or (high is not None and value > high):
            raise ValueError(words)
        return value

    return parse


def real(low: float, high: float | None = None, *, above: bool = False) -> Parser:
    """A finite number in [low, high], or in (low, high] when ``above``, in the notation of every programming language:
    not all that Python reads as one (``1_0``, digits of other scripts)."""
    bound = f"above {low:g}" if above else f"of at least {low:g}"
    words = f"a number {bound}" if high is None else f"a number {bound} and at most {format_value(float(high))}"

    def parse(text: str) -> float:
        digits = text.strip()
        if not _REAL.fullmatch(digits):
            raise ValueError(words)
        value = float(digits)
        too_low = value <= low if above else value < low
        if not math.isfinite(value) or too_low or (high is not None and value > high):
            raise ValueError(words)
        return value

    return parse


def gib(*, above: bool = False) -> Parser:
    """A size in GiB from 0, or above it; bounded, so that its bytes can be counted."""
    return real(0, MOST_GIB, above=above)


def choice(*words: str) -> Parser:
    """One of the words, as it is written."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return word

    return parse


def or_word(parse_other: Parser, *words: str) -> Parser:
    """One of the words, else what ``parse_other`` takes."""

    def parse(text: str) -> object:
        word = text.strip().lower()
        if word in words:
            return word
        try:
            return parse_other(text)
        except ValueError as error:
            raise ValueError(f"{', '.join(words)}, or {error}") from None

    return parse


def parse_kv(text: str) -> int:
    """16 (BF16) or 32 (FP32)."""
    word = text.strip().lower()
    if word == "int8":
        raise ValueError("16 or 32: an 8-bit KV cache is not implemented in this version")
    if word not in ("16", "32"):
        raise ValueError("16 or 32")
    return int(word)


def parse_prefill(text: str) -> Prefill:
    """``auto``, ``auto:N`` or N rows."""
    word = text.strip().lower()
    head, colon, tail = word.partition(":")
    try:
        if head == AUTO:
            return Prefill(int(str(whole(1)(tail)))) if colon else Prefill()
        return Prefill(int(str(whole(1)(word))), is_auto=False)
    except ValueError:
        raise ValueError("auto, auto:N, or N, with N a whole number of at least 1") from None


def device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:i``."""
    word = text.strip().lower()
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", word):
        raise ValueError("auto, cpu, cuda, or cuda:i")
    return word


def format_value(value: object) -> str:
    """The text that parses to ``value``; ``-`` where no value is set."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)
