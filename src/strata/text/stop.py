"""Stop strings in text that arrives in pieces.

Text that could be the beginning of a stop string is held back until it is known. Where an answer is cut depends on
the text alone, not on its pieces: the first stop string to be complete ends it, and among several complete at the
same character the longest, which begins first. It must not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.errors import RequestError

__all__ = ["StopStrings"]


class StopStrings:
    """Watches one answer. After a match nothing more is taken."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise RequestError("stop: an empty string would end every answer at once", "leave it out")
        self._stops = tuple(dict.fromkeys(stops))
        self._beginnings = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that is certain with ``piece``. When a stop string is complete, ``matched`` is set, and the text
        before it is the last."""
        assert self.matched is None, "the answer has ended"
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = self._beginning_length(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, when the answer ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _beginning_length(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
