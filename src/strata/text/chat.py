"""A conversation to a prompt, by the checkpoint's own chat template.

The result is a list of segments, so that control tokens written by the template count and those typed by a user do
not. When a template refuses, its own words reach the user. It must not know HTTP or engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from strata.errors import CheckpointError, RequestError
from strata.text.control_text import ControlText, Segment
from strata.text.family_template import FAMILY_TEMPLATE
from strata.text.messages import plain_messages, plain_tools
from strata.text.template_environment import TemplateRefusal, environment
from strata.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "RenderedChat"]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What a template, a stranger's program, is known to raise when messages are not to its liking.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt: ``segments`` for ``Tokenizer.encode_segments``; ``opens_reasoning`` when it ends inside ``<think>``,
    so that the answer begins with reasoning; ``before``: what the answer's message says already, behind its
    reasoning."""

    segments: tuple[Segment, ...]
    opens_reasoning: bool
    before: str = ""

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class ChatTemplate:
    """The compiled templates of one checkpoint. Safe to share between threads.

    ``origin`` says where the template comes from: "checkpoint" or "family default".
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], control: ControlText, *, origin: str):
        """``sources``: template by name ("default", and "tool_use" for conversations with tools); ``names``: the
        tokens that templates may print (``bos_token``, ...). Raises CheckpointError for a template with a fault."""
        sandbox = environment()
        self.origin = origin
        self.sources = dict(sources)
        self._names = dict(names)
        self._control = control
        self._templates = {name: _compile(sandbox, name, source) for name, source in sources.items()}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The checkpoint's templates; where it has none the family's, or None if the vocabulary lacks its tokens."""
        sources = tokenizer.files.chat_templates
        names = tokenizer.files.named_tokens()
        if sources:
            return cls(sources, names, tokenizer.control_text, origin="checkpoint")
        if any(tokenizer.token_id(token) is None for token in ("<|im_start|>", "<|im_end|>")):
            return None
        start = "{{- bos_token -}}" if tokenizer.adds_bos else ""
        sources = {"default": start + FAMILY_TEMPLATE}
        return cls(sources, names, tokenizer.control_text, origin="family default")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        continue_last: bool = False,
    ) -> RenderedChat:
        """The prompt for the next answer.

        ``options`` are template variables such as ``enable_thinking``. ``continue_last`` lets the answer go on
        where the last message, an assistant's, ends. Raises RequestError (400) with the template's own words.
        """
        plain, plain_tool_list = plain_messages(messages), plain_tools(tools)
        self._fit_arguments(plain)
        reserved = _RESERVED.intersection(options or {})
        if reserved:
            raise RequestError(f"template option {min(reserved)} is set by the request itself", "leave it out")
        variables = {**self._names, **(options or {})}
        mark, end = self._marks((plain, plain_tool_list, options))
        prefill = self._open_last(plain, end) if continue_last else ""
        variables["messages"] = [self._marked_message(message, mark) for message in plain]
        variables["tools"] = self._marked(plain_tool_list, mark)
        variables.update(self._marked(dict(options or {}), mark))
        variables["documents"] = None
        variables["add_generation_prompt"] = not continue_last
        text = self._run("tool_use" if tools and "tool_use" in self._templates else "default", variables, mark + end)
        if continue_last:
            head, found, _ = text.partition(end)
            if not found:
                raise RequestError("the chat template does not print the last message", "it cannot be continued")
            text = head
        opens = _is_open(prefill) if continue_last else text.rstrip().endswith("<think>")
        said = "" if opens else prefill.rpartition("</think>")[2]
        return RenderedChat(tuple(self._control.segments(text, mark)), opens, said)

    @cached_property
    def answer_end(self) -> str | None:
        """The control token that the template writes right after an assistant's message: it ends answers, though
        published sets of EOS ids often lack it. None where the template ends a message otherwise."""
        end = "\ufdef"
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{end}"}]
        variables = {**self._names, "messages": conversation, "tools": None, "documents": None}
        try:
            text = self._run("default", {**variables, "add_generation_prompt": False}, end)
        except RequestError:
            return None
        return self._control.token_at_start(text.partition(end)[2].lstrip())

    @cached_property
    def _prints_raw_arguments(self) -> bool:
        """Whether the template takes a past call's arguments as text; many go through the keys of an object."""
        raw = "raw arguments"
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": raw}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        variables = {**self._names, "messages": messages, "tools": None, "documents": None}
        name = "tool_use" if "tool_use" in self._templates else "default"
        try:
            return raw in self._run(name, {**variables, "add_generation_prompt": False}, "")
        except RequestError:
            return False

    def _fit_arguments(self, messages: list[dict[str, Any]]) -> None:
        """Arguments that are no object stay text where the template can print that; else they get a name."""
        for message in messages:
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                if isinstance(arguments, str) and not self._prints_raw_arguments:
                    call["function"]["arguments"] = {"arguments": arguments}

    def _run(self, name: str, variables: Mapping[str, Any], marks: str) -> str:
        template = self._templates.get(name)
        if template is None:
            raise RequestError(f"the checkpoint has no default chat template, only {', '.join(self._templates)}")
        try:
            return template.render(variables)
        except TemplateRefusal as refusal:
            raise RequestError(_clean(str(refusal), marks), code="chat_template_refused") from refusal
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            words = _clean(str(error), marks) or type(error).__name__
            raise RequestError(f"the chat template failed: {words}", code="chat_template_failed") from error

    def _marks(self, given: object) -> tuple[str, str]:
        """A mark for control tokens and one for the end of the last message, neither of which occurs in the input."""
        strings = list(_strings(given))
        mark = self._control.mark_for(strings)
        return mark, self._control.mark_for([*strings, mark])

    def _open_last(self, plain: list[dict[str, Any]], end: str) -> str:
        last = plain[-1]
        if last["role"] != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
            raise RequestError("only an assistant's text can be continued", "let the last message be one")
        content: str = last["content"]
        last["content"] = content + end
        return content

    def _marked_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """An assistant's content keeps ``<think>`` and the like: it is the model's own format, and templates split
        it there. Its special tokens are text all the same."""
        marked: dict[str, Any] = {
            key: value if key == "role" else self._marked(value, mark) for key, value in message.items()
        }
        if message["role"] == "assistant" and isinstance(message.get("content"), str):
            marked["content"] = self._control.mark(message["content"], mark, special_only=True)
        return marked

    def _marked(self, value: Any, mark: str, key: str = "") -> Any:
        """``value`` with every string marked, names of parameters too. ``type`` is left: templates compare it."""
        if isinstance(value, str):
            return value if key == "type" and value.isalnum() else self._control.mark(value, mark)
        if isinstance(value, list):
            return [self._marked(item, mark, key) for item in value]
        if isinstance(value, dict):
            named = key in ("arguments", "properties")
            return {
                self._control.mark(name, mark) if named or self._control.has_structure(name) else name: self._marked(
                    item, mark, "" if named else name
                )
                for name, item in value.items()
            }
        return value


def _compile(sandbox: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return sandbox.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"chat template {name!r}, line {error.lineno}: {error.message}", "correct chat_template.jinja"
        ) from error
    except jinja2.TemplateError as error:
        raise CheckpointError(f"chat template {name!r}: {error}", "correct chat_template.jinja") from error


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)


def _clean(words: str, marks: str) -> str:
    return words.translate({ord(mark): None for mark in marks})


def _is_open(content: str) -> bool:
    return content.rfind("<think>") > content.rfind("</think>")
