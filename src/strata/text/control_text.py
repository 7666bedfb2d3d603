"""Keeps control tokens typed by a user apart from those a chat template writes.

Both end up in one rendered string. Before rendering, each user string is *marked*: one noncharacter is put inside
every control token in it, so that it no longer reads as one. After rendering, control tokens that still read as such
were written by the template; everything between them is text, with the marks taken out again. A template's own tests
on content (``startswith``, ``strip``, ``in``) are undisturbed unless they look for a control token.

It must not know what a conversation is, nor how text becomes ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from strata.errors import RequestError

__all__ = ["ControlText", "ControlToken", "Segment"]

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class ControlToken:
    """A control token, whether decoding hides it, and how it takes the white space beside it."""

    text: str
    special: bool = True
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True)
class Segment:
    """A run of a prompt. ``markers``: control tokens in ``text`` count as such; otherwise all of it is plain text."""

    text: str
    markers: bool


class ControlText:
    """Marks, finds and splits at the control tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._tokens: Mapping[str, ControlToken] = {token.text: token for token in tokens}
        self.special = frozenset(token.text for token in self._tokens.values() if token.special)
        by_length = sorted(self._tokens, key=len, reverse=True)
        # A pattern that never matches stands for "no control tokens".
        self._pattern = re.compile("|".join(re.escape(text) for text in by_length) or r"(?!)")
        self._prefixes = {text[:length] for text in self._tokens for length in range(1, len(text))}
        self._infixes = {
            text[start:stop]
            for text in self._tokens
            for start in range(1, len(text))
            for stop in range(start + 1, len(text) + 1)
            if text[start:stop].strip()
        }
        self._longest = max((len(text) for text in self._tokens), default=0)

    def found_in(self, text: str) -> bool:
        """Whether a control token can be read anywhere in ``text``."""
        return self._pattern.search(text) is not None

    def first(self, text: str) -> tuple[int, int] | None:
        """Start and end of the first control token in ``text``."""
        match = self._pattern.search(text)
        return match.span() if match else None

    def mark_for(self, strings: Iterable[str]) -> str:
        """A noncharacter that none of ``strings`` contains."""
        free = set(_NONCHARACTERS)
        for string in strings:
            free.difference_update(string)
        if not free:
            raise RequestError("the messages hold every one of the noncharacters U+FDD0 to U+FDEF", "remove them")
        return min(free)

    def mark(self, text: str, mark: str, *, only: frozenset[str] | None = None) -> str:
        """``text`` with ``mark`` inside every control token, and inside any end of it that could begin or continue
        one together with what the template writes next to it. ``only`` limits this to the named tokens."""
        marked = self._pattern.sub(lambda found: _broken(found[0], mark, only), text)
        if only is None and len(text) <= self._longest and text in self._infixes:
            return text[:1] + mark + text[1:]
        for length in range(min(self._longest - 1, len(marked)), 0, -1):
            tail = marked[-length:]
            if tail in self._prefixes:
                return marked[:-length] + tail[:1] + mark + tail[1:]
        return marked

    def segments(self, rendered: str, mark: str) -> list[Segment]:
        """Split a rendered prompt: one segment when nothing was marked, else template markers and text by turns."""
        if mark not in rendered:
            return [Segment(rendered, markers=True)]
        segments: list[Segment] = []
        position = 0
        strips = False
        for match in self._pattern.finditer(rendered):
            token = self._tokens[match[0]]
            between = rendered[position : match.start()]
            between = between.lstrip() if strips else between
            _append_text(segments, between.rstrip() if token.strips_left else between, mark)
            segments.append(Segment(token.text, markers=True))
            position, strips = match.end(), token.strips_right
        rest = rendered[position:]
        _append_text(segments, rest.lstrip() if strips else rest, mark)
        return segments


def _broken(token: str, mark: str, only: frozenset[str] | None) -> str:
    return token if only is not None and token not in only else token[:1] + mark + token[1:]


def _append_text(segments: list[Segment], text: str, mark: str) -> None:
    text = text.replace(mark, "")
    if text:
        segments.append(Segment(text, markers=False))
