"""Token ids to text as they come, never showing half a character.

A character can lie over several tokens; what is not yet whole is held back, so that the joined pieces equal the
decoded whole and a replacement character appears only where the bytes themselves are not UTF-8. It must not know
stop strings or formats.
"""

from __future__ import annotations

import codecs

from strata.text.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder"]


class IncrementalDecoder:
    """Decodes one sequence. ``shown`` names hidden tokens that are to be shown all the same (a parser's markers);
    ``from_start`` is for a sequence that begins a text rather than continues a prompt (SentencePiece models drop
    their leading space there)."""

    def __init__(self, tokenizer: Tokenizer, *, shown: frozenset[int] = frozenset(), from_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids - shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = from_start and tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that became whole with ``token_id``; often one character more or less than the token's own."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._drops_space and data:
            self._drops_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is held back at the end: U+FFFD for the start of a character that never came whole."""
        return self._decoder.decode(b"", True)
