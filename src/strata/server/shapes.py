"""Pieces of an answer as the bodies and chunks of OpenAI's two interfaces.

Lives in ``server``; one class an interface, the same for streams and whole answers, so that both say the same. It
must not know HTTP or threads.

Order of a stream, which clients rely on: chunks whose ``finish_reason`` is null, one chunk with the reason, then,
where it was asked for, one chunk with the usage and no choices. Source: OpenAI's published reference.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from strata.engine.generation import Piece
from strata.server.logprobs import LogprobList
from strata.text.events import AnswerEvent, Finish, ReasoningPiece, TextPiece, ToolCall
from strata.text.finish_names import chat_reason, completion_reason
from strata.version import VERSION

if TYPE_CHECKING:
    from strata.engine.engine import Request, Usage
    from strata.text.tokenizer import Tokenizer

__all__ = ["ChatShape", "CompletionShape", "Shape"]


class Shape(ABC):
    """What the two interfaces share. ``take`` every piece once; then ``whole``, or send what ``take`` returns."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, request: Request, model: str, tokenizer: Tokenizer, *, include_usage: bool, offset: int = 0):
        self._request = request
        self._include_usage = include_usage
        self._logprobs = LogprobList(tokenizer, offset=offset)
        self._head = {
            "id": f"{self.prefix}{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"strata-{VERSION}",
        }

    @abstractmethod
    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece, the one with the reason included; for a whole answer they are dropped."""

    @abstractmethod
    def first(self) -> list[dict[str, Any]]:
        """Chunks that come before any piece."""

    @abstractmethod
    def _choice(self) -> dict[str, Any]:
        """The whole answer's one choice."""

    def whole(self, usage: Usage | None) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": [self._choice()], "usage": self._usage(usage)}

    def last(self, usage: Usage | None) -> list[dict[str, Any]]:
        """Chunks that come after the one with the reason."""
        if not self._include_usage:
            return []
        return [{**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage(usage)}]

    def _chunk(self, content: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _count(self, piece: Piece) -> None:
        """Takes the piece's log-probability, unless its token is an end id, which is not part of the answer."""
        if piece.choice is None:
            return
        finish = self._request.stream.finish if piece.finish is not None else None
        if finish is None or finish.stop_id is None:
            self._logprobs.take(piece.choice)

    def _usage(self, usage: Usage | None) -> dict[str, Any]:
        prompt = usage.prompt_tokens if usage else len(self._request.ids)
        completion = usage.completion_tokens if usage else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens if usage else 0},
            "completion_tokens_details": {"reasoning_tokens": self._request.stream.num_reasoning_tokens},
        }


class ChatShape(Shape):
    """``/v1/chat/completions``. Reasoning goes into ``reasoning_content``, beside the content."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, request: Request, model: str, tokenizer: Tokenizer, *, include_usage: bool = False):
        super().__init__(request, model, tokenizer, include_usage=include_usage)
        self._text = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self._reason: str | None = None

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        self._count(piece)
        chunks = [self._delta(self._event(event)) for event in piece.events]
        if piece.finish is not None and piece.finish != "cancelled":
            self._reason = chat_reason(Finish(piece.finish))
            chunks.append(self._delta({}))
        return chunks

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs.chat()
        if logprobs:
            self._entries += logprobs["content"]
        return self._chunk({"delta": delta}, logprobs, None if delta else self._reason)

    def _event(self, event: AnswerEvent) -> dict[str, Any]:
        if isinstance(event, ToolCall):
            function = {"name": event.name, "arguments": event.arguments}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": event.index, **call}]}
        if isinstance(event, ReasoningPiece):
            self._reasoning += event.text
            return {"reasoning_content": event.text}
        assert isinstance(event, TextPiece)
        self._text += event.text
        return {"content": event.text}

    def _choice(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not self._text else self._text,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._entries, "refusal": None} if self._request.params.logprobs is not None else None
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self._reason}


class CompletionShape(Shape):
    """``/v1/completions``. ``echo`` is the prompt's text where the answer repeats it."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, request: Request, model: str, tokenizer: Tokenizer, *, include_usage: bool = False, echo: str):
        super().__init__(request, model, tokenizer, include_usage=include_usage, offset=len(echo))
        self._echo = self._text = echo
        self._lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._reason: str | None = None

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk({"text": self._echo}, None, None)] if self._echo else []

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        self._count(piece)
        chunks = []
        if piece.text:
            self._text += piece.text
            chunks.append(self._chunk({"text": piece.text}, self._new_logprobs(), None))
        if piece.finish is not None and piece.finish != "cancelled":
            self._reason = completion_reason(Finish(piece.finish))
            chunks.append(self._chunk({"text": ""}, self._new_logprobs(), self._reason))
        return chunks

    def _new_logprobs(self) -> dict[str, Any] | None:
        logprobs = self._logprobs.completion()
        for name, values in (logprobs or {}).items():
            self._lists[name] += values
        return logprobs

    def _choice(self) -> dict[str, Any]:
        logprobs = self._lists if self._request.params.logprobs is not None else None
        return {"index": 0, "text": self._text, "logprobs": logprobs, "finish_reason": self._reason}
