"""Where a place of a Markdown text lies: in code, in a block quote, or in plain words, told as the text comes.

A place can be undecided: a fence or a run of backticks is open before it and may or may not be closed behind it. What
lies at a place (a tool call) is opaque: its own backticks and line breaks count for nothing. Rules: decision 0120.
It must not know tool calls.

Source: CommonMark 0.31.2, fenced code blocks (4.5), block quotes (5.1), list items (5.2) and code spans (6.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CodeContext", "Place"]

_PLACE = "\ufffc"  # stands in its line for what lies at a place; as a character of a text it is an ordinary one
_MARKER = r"(?:[-+*]|\d{1,9}[.)])[ \t]+"
_OPENING = re.compile(rf"(?: {{0,3}}| *(?P<item>(?:{_MARKER})+))(?P<run>`{{3,}}(?=[^`]*$)|~{{3,}})")
_CLOSING = re.compile(r"(?P<indent> *)(?P<run>`{3,}|~{3,})[ \t]*$")
_QUOTE = re.compile(rf"(?: {{0,3}}| *(?:{_MARKER})+ {{0,3}})>")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]|$)")
_ITEM = re.compile(rf"[ \t]*{_MARKER}(?=\S)")
# A line of these alone: a break between paragraphs, or what makes a heading of the paragraph above.
_RULE = re.compile(r" {0,3}(?:-[- \t]*|=+[ \t]*|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$")
_INLINE = re.compile(rf"\\?`+|\\[!-/:-@\[-_{{-~]|{_PLACE}")


@dataclass
class Place:
    """``code``: whether it lies in code or a quote; None while that is undecided."""

    code: bool | None = None


@dataclass(frozen=True)
class _Fence:
    character: str
    length: int
    most_indent: int  # of the line that closes it


class CodeContext:
    """Follows one text. A line is read when it is whole; before that a place is decided only where nothing that may
    come can change it."""

    def __init__(self) -> None:
        self._fence: _Fence | None = None
        self._fenced: list[Place] = []  # undecided, since the fence was opened
        self._runs: list[int] = []  # lengths of the runs of backticks that the paragraph has not closed
        self._spanned: list[tuple[int, Place]] = []  # undecided places of the paragraph, and how many runs were open
        self._line: list[str] = []
        self._places: dict[int, Place] = {}  # those of the line that is being written, by their position in it

    @property
    def quoted(self) -> bool:
        """Whether what comes next lies on a line of a block quote."""
        return self._fence is None and _QUOTE.match("".join(self._line)) is not None

    def push(self, text: str) -> None:
        """More text; decides the places that it decides."""
        *lines, rest = text.split("\n")
        for line in lines:
            self._line.append(line)
            self._end_line()
        self._line.append(rest)

    def place(self) -> Place:
        """The place that has been reached, decided if it can be."""
        before = "".join(self._line)
        line = before + _PLACE
        place = Place()
        if self.quoted:
            place.code = True
        elif self._fence is None and _opened(line) is None:
            runs = [] if _begins_block(line) else list(self._runs)
            _read_runs(before, runs, {}, [])
            place.code = None if runs else False
        self._line = [line]
        self._places[len(before)] = place
        return place

    def finish(self) -> None:
        """The text has ended: every place is decided. What a fence or a run that is still open precedes is no code."""
        self._end_line()
        self._end_paragraph()
        _decide(self._fenced, code=False)

    def _end_line(self) -> None:
        line, places = "".join(self._line).rstrip("\r"), self._places
        self._line, self._places = [], {}
        if self._fence is not None:
            self._fenced += places.values()
            if _closes(line, self._fence):
                _decide(self._fenced, code=True)
                self._fence, self._fenced = None, []
        elif fence := _opened(line):
            self._end_paragraph()
            self._fence, self._fenced = fence, list(places.values())
        elif _QUOTE.match(line):
            self._end_paragraph()
        else:
            if _begins_block(line):
                self._end_paragraph()
            _read_runs(line, self._runs, places, self._spanned)
            if _HEADING.match(line):
                self._end_paragraph()

    def _end_paragraph(self) -> None:
        _decide((place for _, place in self._spanned), code=False)
        self._runs, self._spanned = [], []


def _opened(line: str) -> _Fence | None:
    found = _OPENING.match(line)
    if found is None:
        return None
    return _Fence(found["run"][0], len(found["run"]), 3 + (found.start("run") if found["item"] else 0))


def _closes(line: str, fence: _Fence) -> bool:
    found = _CLOSING.match(line)
    if found is None or len(found["indent"]) > fence.most_indent:
        return False
    return found["run"][0] == fence.character and len(found["run"]) >= fence.length


def _begins_block(line: str) -> bool:
    """Whether a line that is no fence and no quote belongs to another paragraph than the line before."""
    return not line.strip() or any(kind.match(line) for kind in (_HEADING, _ITEM, _RULE))


def _read_runs(line: str, runs: list[int], places: dict[int, Place], spanned: list[tuple[int, Place]]) -> None:
    """Follow the runs of backticks of one line. ``runs`` and ``spanned`` are the paragraph's and go on from line to
    line. A run closes the first open run of its length, and with it what was opened in between."""
    for found in _INLINE.finditer(line):
        word = found[0]
        if word == _PLACE:
            place = places.get(found.start())
            if place is not None and runs:
                spanned.append((len(runs), place))
            elif place is not None:
                place.code = False
        elif word.endswith("`"):
            ticks = word.lstrip("\\")
            # A backslash takes one backtick from a run that would open; what closes one knows no backslash.
            opening = len(ticks) - (len(word) > len(ticks))
            if len(ticks) in runs:
                level = runs.index(len(ticks))
                del runs[level:]
                _decide((place for depth, place in spanned if depth > level), code=True)
                spanned[:] = [(depth, place) for depth, place in spanned if depth <= level]
            elif opening and opening not in runs:
                runs.append(opening)


def _decide(places: Iterable[Place], *, code: bool) -> None:
    for place in places:
        place.code = code
