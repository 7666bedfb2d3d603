"""Token ids of one answer to events, in the order that makes each step right: end ids, bytes, stop strings, formats.

Engine and server both use it: the engine to know when an answer is over, the server to show it. It must not know
logits, HTTP, or whose answer it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strata.text.answer_parser import AnswerParser
from strata.text.events import AnswerEvent, Finish, merged
from strata.text.incremental import IncrementalDecoder
from strata.text.stop import StopStrings
from strata.text.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """One answer. ``finish`` is None while it goes on; after it is set nothing more may be pushed.

    ``num_tokens`` counts every pushed id, the one that ended the answer included; ``num_reasoning_tokens`` those
    that came while the answer was inside its reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        parser: AnswerParser | None = None,
    ) -> None:
        """``end_ids`` end the answer and are not shown (EOS ids and the request's own); ``stop`` likewise as text,
        and as the token itself where it names one that is never shown (``<|im_end|>``)."""
        self._stop_of = {id_: text for text in stop if (id_ := tokenizer.token_id(text)) in tokenizer.hidden_ids}
        self._end_ids = frozenset(end_ids).union(self._stop_of)
        self._parser = parser if parser is not None else AnswerParser()
        markers = (tokenizer.token_id(marker) for marker in self._parser.markers)
        shown = frozenset(id_ for id_ in markers if id_ is not None) - self._end_ids
        self._decoder = IncrementalDecoder(tokenizer, shown=shown)
        self._stops = StopStrings(stop)
        self.finish: Finish | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def push(self, token_id: int) -> list[AnswerEvent]:
        """Events that are certain with ``token_id``; sets ``finish`` when the answer is over."""
        assert self.finish is None, "the answer has ended"
        self.num_tokens += 1
        if self._parser.in_reasoning:
            self.num_reasoning_tokens += 1
        if token_id in self._end_ids:
            return self._close(Finish("stop", self._stop_of.get(token_id), token_id))
        return self._take(self._decoder.push(token_id))

    def close(self) -> list[AnswerEvent]:
        """The rest of an answer that ended by its length; sets ``finish``. No effect once it has ended."""
        return [] if self.finish is not None else self._close(Finish("length"))

    def _take(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        events = self._parser.push(self._stops.push(text))
        if self._stops.matched is not None:
            events += self._end(Finish("stop", stop_string=self._stops.matched))
        return merged(events)

    def _close(self, finish: Finish) -> list[AnswerEvent]:
        """Say what the decoder and the stop strings held back; a half character can complete no stop string that
        matters more than the end itself."""
        rest = self._decoder.finish()
        events: list[AnswerEvent] = []
        if rest:
            events = self._parser.push(self._stops.push(rest))
            if self._stops.matched is not None:
                finish = Finish("stop", stop_string=self._stops.matched)
        if self._stops.matched is None:
            events += self._parser.push(self._stops.finish())
        return merged(events + self._end(finish))

    def _end(self, finish: Finish) -> list[AnswerEvent]:
        events = self._parser.finish()
        called = finish.reason == "stop" and self._parser.num_calls > 0
        self.finish = Finish("tool_calls", finish.stop_string, finish.stop_id) if called else finish
        return events
