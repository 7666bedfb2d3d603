"""The one error tree: every mistake a user can make or meet, with the way out in it.

Lives at the top because every room raises from it; it imports nothing of Strata. A broken invariant
is an ``assert``, never one of these. The CLI prints ``str(error)`` as one line, the hint as a second,
and exits with ``exit_status``; the server answers with ``http_status`` and ``code``.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "MemoryPlanError",
    "RequestError",
    "StrataError",
    "lacks_memory",
    "one_line",
]


_LONGEST = 2000  # characters of a line; the longest that names its numbers have a tenth of it, and a path


def one_line(text: str) -> str:
    """``text`` in one line that a terminal only shows: what a damaged file says is in it, of any length and letters."""
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class StrataError(Exception):
    """Base of all named errors. ``message`` names the thing and the numbers; ``hint`` the way out."""

    exit_status = 2
    http_status = 500
    code = "engine_error"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = one_line(message)
        self.hint = one_line(hint)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(StrataError):
    """An option, environment variable, or configuration key that cannot be taken as written."""

    http_status = 400
    code = "invalid_configuration"


class CheckpointError(StrataError):
    """A model file that is absent, damaged, of a kind that is not read, or does not fit its config."""

    code = "invalid_checkpoint"


class MemoryPlanError(StrataError):
    """What was asked for does not fit: says how many bytes are short and which option helps."""

    http_status = 507
    code = "insufficient_memory"

    def __init__(self, message: str, hint: str = "", *, short_bytes: int = 0) -> None:
        super().__init__(message, hint)
        self.short_bytes = short_bytes


class RequestError(StrataError):
    """A request that cannot be served: a client's mistake unless ``http_status`` says otherwise."""

    def __init__(self, message: str, hint: str = "", *, http_status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message, hint)
        self.http_status = http_status
        self.code = code


class EngineError(StrataError):
    """The engine could not finish a round: a dead worker, a missed deadline, logits not finite."""

    exit_status = 1


# How native code words it in errors of other kinds: the loader of libraries, torch's allocator, C++, the C library.
MEMORY_WORDS = (
    "cannot allocate memory", "can't allocate memory", "failed to map segment", "cannot map zero-fill", "bad_alloc",
    "can't start new thread", "cannot allocate thread",
)  # fmt: skip


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of any kind says that memory, or room for a thread's stack, is what is missing."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in MEMORY_WORDS)
