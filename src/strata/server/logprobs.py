"""Log-probabilities of an answer in the two forms of the interface.

Lives in ``server`` because the forms are the interface's; the numbers are the sampler's. It must not know routes.
"""

from __future__ import annotations

import codecs
from typing import Any

from strata.engine.sampler import Choice
from strata.text.tokenizer import Tokenizer

__all__ = ["LogprobList"]


class LogprobList:
    """Collects tokens, gives what came since the last time, and counts where each token's text begins."""

    def __init__(self, tokenizer: Tokenizer, *, offset: int = 0) -> None:
        """``offset``: characters before the answer, for a completion that repeats its prompt."""
        self._tokenizer = tokenizer
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._new: list[tuple[Choice, int]] = []

    def take(self, choice: Choice) -> None:
        if choice.logprob is None:
            return
        self._new.append((choice, self._offset))
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(choice.token)))

    def chat(self) -> dict[str, Any] | None:
        """``{"content": [...]}`` of the tokens since the last call; None for none."""
        taken, self._new = self._new, []
        if not taken:
            return None
        entries = [
            {
                **self._entry(choice.token, choice.logprob or 0.0),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in choice.top],
            }
            for choice, _ in taken
        ]
        return {"content": entries, "refusal": None}

    def completion(self) -> dict[str, Any] | None:
        """Parallel lists of the tokens since the last call; None for none."""
        taken, self._new = self._new, []
        if not taken:
            return None
        return {
            "tokens": [self._text(choice.token) for choice, _ in taken],
            "token_logprobs": [choice.logprob for choice, _ in taken],
            "top_logprobs": [self._likeliest(choice) for choice, _ in taken],
            "text_offset": [offset for _, offset in taken],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}

    def _likeliest(self, choice: Choice) -> dict[str, float]:
        """By text; of tokens with one text the likeliest, which comes first."""
        found: dict[str, float] = {}
        for token, logprob in choice.top:
            found.setdefault(self._text(token), logprob)
        return found

    def _text(self, token: int) -> str:
        """A token's text; of a part of a character its bytes, as the interface writes them."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
