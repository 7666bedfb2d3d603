"""A process that compiles kernels for another one until that one closes its pipe; ``compile`` starts it.

The compiler replaces the handlers of signals while it reads a source, cannot be stopped, and brings down an interpreter
that ends beside it. In a process of its own it harms nobody and is killed at once (decision record 0124). It must not
know a cache: it writes to its pipe alone.

A request is a line of JSON, an answer another, followed by as many bytes as it announces.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import IO, Any

from strata.errors import StrataError
from strata.kernels.cuda.compile import KernelSource, compile_source

__all__ = ["main"]


def main() -> None:
    """Answers on what is standard output when it begins; the compiler's own words go to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started this ends it
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            _serve(json.loads(line), answers)


def _serve(request: dict[str, Any], answers: IO[bytes]) -> None:
    headers = {name: text.encode() for name, text in request["headers"].items()}
    source = KernelSource(request["name"], request["text"].encode(), headers, request["part"])
    image = b""
    answer: dict[str, Any] = {}
    try:
        image = compile_source(source, request["architecture"], defines=request["defines"])
        answer["bytes"] = len(image)
    except StrataError as error:
        answer |= {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    answers.write(json.dumps(answer).encode() + b"\n" + image)
    answers.flush()
