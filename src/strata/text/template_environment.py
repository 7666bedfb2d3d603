"""The sandbox in which a checkpoint's chat template runs, with the functions that published templates call.

A template is a program from a stranger: it runs in jinja2's immutable sandbox, with no loader and no file access. It
must not know messages or tokens.

Source: the functions and block settings that Hugging Face documents for chat templates (``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, ``break``/``continue``, ``generation`` blocks).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateRefusal", "environment"]


_ESCAPE = re.compile(r"\\(\\|ufd[de][0-9a-f])")


class TemplateRefusal(jinja2.TemplateError):
    """A template called ``raise_exception``: its words are for the user."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what a model said, for training; here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment(now: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """A fresh sandbox; ``now`` is the clock of ``strftime_now``."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: now().strftime(form)
    return sandbox


def _refuse(words: object = "") -> str:
    raise TemplateRefusal(str(words))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Noncharacters are marks that are taken out after rendering: escaped they would stay, as six characters.
    return _ESCAPE.sub(lambda found: found[0] if found[1] == "\\" else chr(int(found[1][1:], 16)), text)
