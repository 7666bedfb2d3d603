"""Keeps control tokens typed by a user apart from those a chat template writes.

Both end up in one rendered string. Before rendering, each user string is *marked*: one noncharacter is put inside
every control token in it, so that it no longer reads as one. After rendering, control tokens that still read as such
were written by the template; everything between them is text, with the marks taken out again. A template's own tests
on content (``startswith``, ``strip``, ``in``) are undisturbed unless they look for a control token.

Words that a template or a parser treats as structure are marked in the same way, also where they are no tokens.

It must not know what a conversation is, nor how text becomes ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from strata.errors import RequestError

__all__ = ["ControlText", "ControlToken", "Segment"]

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Characters that are searched in one call of the library, which keeps every other thread of Python waiting.
_STRIDE = 1 << 16


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
    """Marks, finds and splits at the control tokens of one tokenizer.

    ``words`` are marked too: structure that need not be a token. They are never split at.
    """

    def __init__(self, tokens: Iterable[ControlToken], words: Iterable[str] = ()) -> None:
        self._tokens: Mapping[str, ControlToken] = {token.text: token for token in tokens}
        marked = {*self._tokens, *words}
        self._pattern = _Pattern(self._tokens)
        self._structure = _Pattern(marked)
        self._special = _Pattern(token.text for token in self._tokens.values() if token.special)
        self._beginnings = {text[:length] for text in marked for length in range(1, len(text))}
        self._endings = {text[start:] for text in marked for start in range(1, len(text))}
        self._middles = {ending[:length] for ending in self._endings for length in range(1, len(ending))}
        self._longest = max((len(text) for text in marked), default=0)

    def found_in(self, text: str) -> bool:
        """Whether a control token can be read anywhere in ``text``."""
        return self._pattern.search(text) is not None

    def has_structure(self, text: str) -> bool:
        """Whether ``mark`` would change the middle of ``text``."""
        return self._structure.search(text) is not None

    def token_at_start(self, text: str) -> str | None:
        """The control token that ``text`` begins with."""
        match = self._pattern.match(text)
        return match[0] if match else None

    def pieces(self, text: str) -> list[str]:
        """``text`` cut behind the first character of every control token, so that no piece holds one."""
        return _cut(text, self._pattern)

    def mark_for(self, strings: Iterable[str]) -> str:
        """A noncharacter that none of ``strings`` contains."""
        strings = list(strings)
        for mark in _NONCHARACTERS:
            if not any(mark in string for string in strings):
                return mark
        raise RequestError("the messages hold every one of the noncharacters U+FDD0 to U+FDEF", "remove them")

    def mark(self, text: str, mark: str, *, special_only: bool = False) -> str:
        """``text`` with ``mark`` inside every control token and structure word, and at any end of it that could make
        one together with what the template writes next to it. ``special_only`` leaves all but special tokens in it as
        they are."""
        marked = mark.join(_cut(text, self._special if special_only else self._structure))
        if (text in self._middles and text.strip()) or self._fits(text, self._endings, from_start=True):
            # Before the first character, but behind white space, which templates trim.
            start = len(marked) - len(marked.lstrip())
            marked = marked[:start] + mark + marked[start:]
        if length := self._fits(marked, self._beginnings, from_start=False):
            start = len(marked) - length + 1
            marked = marked[:start] + mark + marked[start:]
        return marked

    def _fits(self, text: str, parts: set[str], *, from_start: bool) -> int:
        """Length of the longest of ``parts`` that ``text`` begins or ends with; 0 for none or white space alone."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            part = text[:length] if from_start else text[-length:]
            if part in parts and part.strip():
                return length
        return 0

    def segments(self, rendered: str, mark: str) -> list[Segment]:
        """Split a rendered prompt: one segment when nothing was marked, else template markers and text by turns."""
        if mark not in rendered:
            return [Segment(rendered, markers=True)]
        segments: list[Segment] = []
        position = 0
        strips = False
        for match in self._pattern.find_all(rendered):
            token = self._tokens[match[0]]
            between = rendered[position : match.start()]
            between = between.lstrip() if strips else between
            _append_text(segments, between.rstrip() if token.strips_left else between, mark)
            segments.append(Segment(token.text, markers=True))
            position, strips = match.end(), token.strips_right
        rest = rendered[position:]
        _append_text(segments, rest.lstrip() if strips else rest, mark)
        return segments


class _Pattern:
    """Any of some texts, the longest first; a large text is searched a stride at a time."""

    def __init__(self, texts: Iterable[str]) -> None:
        by_length = sorted(texts, key=len, reverse=True)
        self._longest = len(by_length[0]) if by_length else 1
        self._compiled = re.compile("|".join(re.escape(text) for text in by_length) or r"(?!)")

    def match(self, text: str) -> re.Match[str] | None:
        return self._compiled.match(text)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        while start < len(text):
            end = start + _STRIDE
            found = self._compiled.search(text, start, end + self._longest - 1)
            if found is not None and found.start() < end:  # one that begins later may be seen in part
                return found
            start = end
        return None

    def find_all(self, text: str) -> Iterator[re.Match[str]]:
        start = 0
        while found := self.search(text, start):
            yield found
            start = found.end()


def _cut(text: str, pattern: _Pattern) -> list[str]:
    """Search again behind each cut: tokens can overlap."""
    pieces, start = [], 0
    while match := pattern.search(text, start):
        cut = match.start() + 1
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _append_text(segments: list[Segment], text: str, mark: str) -> None:
    text = text.replace(mark, "")
    if text:
        segments.append(Segment(text, markers=False))
