"""All that a checkpoint says about text, in one object: what engine, server and command line open.

Joins tokenizer, chat template and the formats of its answers, so that their users make no choice twice. It must not
know models or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.errors import RequestError
from strata.text.answer_parser import AnswerParser, ToolFormat, tool_format_of
from strata.text.chat import ChatTemplate
from strata.text.messages import plain_tools
from strata.text.stream import TextStream
from strata.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "TextPipeline"]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation ready for the engine: ``ids``, and how its answer is to be read."""

    ids: tuple[int, ...]
    text: str
    opens_reasoning: bool
    tools: tuple[dict[str, Any], ...] = ()
    before: str = ""


class TextPipeline:
    """The text side of one checkpoint. Immutable; safe to share between threads.

    ``end_ids``: every id that ends an answer: the EOS ids of its files and the token with which its template ends an
    assistant's message. ``template`` is None for a checkpoint that has none and cannot take the family's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate.of(tokenizer)
        source = "\0".join(self.template.sources.values()) if self.template else ""
        self.tool_format: ToolFormat | None = tool_format_of(source)
        self.reasons = "</think>" in source or tokenizer.token_id("</think>") is not None
        ending = self.template.answer_end if self.template else None
        own = None if ending is None else tokenizer.token_id(ending)
        self.end_ids: tuple[int, ...] = tuple(sorted({*tokenizer.eos_ids, *([] if own is None else [own])}))

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]:
        """What the checkpoint recommends, for ``SamplingParams.from_request``."""
        return self.tokenizer.files.sampling_defaults

    @classmethod
    def from_directory(cls, path: str | Path, contents: Mapping[str, bytes] | None = None) -> TextPipeline:
        """Open a checkpoint's folder, or a pack's whose listed files are ``contents``; raises CheckpointError naming
        file and fault."""
        return cls(Tokenizer.from_directory(path, contents))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        check: Callable[[str], None] | None = None,
    ) -> ChatPrompt:
        """A conversation's prompt; arguments and errors as ``ChatTemplate.render``. ``check`` sees the prompt's text
        before it is encoded, and may raise."""
        if self.template is None:
            raise RequestError(
                "the checkpoint has no chat template, and its vocabulary lacks the tokens of the default one",
                "put the model's chat_template.jinja beside tokenizer.json, or ask for a plain completion",
            )
        rendered = self.template.render(messages, tools=tools, options=options, continue_last=continue_last)
        text = rendered.text
        if check is not None:
            check(text)
        # Templates write the BOS token themselves; where one does not, its model was trained without.
        ids = self.tokenizer.encode_segments(rendered.segments)
        known = tuple(plain_tools(tools) or ())
        return ChatPrompt(tuple(ids), text, rendered.opens_reasoning, known, rendered.before)

    def chat_stream(
        self,
        prompt: ChatPrompt,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> TextStream:
        """The stream of a chat answer: reasoning told apart, tool calls found when the request has tools."""
        parser = AnswerParser(
            reasoning=self.reasons,
            opened=prompt.opens_reasoning,
            tool_format=self.tool_format if prompt.tools else None,
            tools=list(prompt.tools),
            before=prompt.before,
        )
        return TextStream(self.tokenizer, end_ids=self._ends(stop_token_ids, ignore_eos), stop=stop, parser=parser)

    def plain_stream(
        self, *, stop: Sequence[str] = (), stop_token_ids: Sequence[int] = (), ignore_eos: bool = False
    ) -> TextStream:
        """The stream of a completion: text alone."""
        return TextStream(self.tokenizer, end_ids=self._ends(stop_token_ids, ignore_eos), stop=stop)

    def _ends(self, more: Sequence[int], ignore_eos: bool) -> tuple[int, ...]:
        return (*more, *(() if ignore_eos else self.end_ids))
