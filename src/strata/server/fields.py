"""What a client may write in a request: served, ignored by name, or refused by name. Nothing is dropped silently.

Lives in ``server`` because the names are OpenAI's interface; ranges of sampling values are ``SamplingParams``' and a
conversation's shape is the text room's. It must not know HTTP or engines.

Source: OpenAI's published reference of chat completions and completions, and the further sampling fields that
engines for local models share (``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ...).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.engine.sampling_params import MAX_TOP_LOGPROBS
from strata.server.faults import FieldError, NotServed

__all__ = ["CHAT", "COMPLETION", "IGNORED", "ChatFields", "CompletionFields", "read_chat", "read_completion"]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)
COMMON = ("model", "stream", "stream_options", "max_tokens", "logprobs", *SAMPLING)
CHAT = (
    *COMMON,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
    "continue_final_message",
)
COMPLETION = (*COMMON, "prompt", "echo", "parse_special")

IGNORED: Mapping[str, str] = {
    "user": "nobody is told apart",
    "safety_identifier": "nobody is told apart",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "prompt_cache_key": "the last conversation is kept whatever its name",
    "prompt_cache_retention": "the last conversation is kept until another comes",
    "prompt_cache_options": "the last conversation is kept until another comes",
}
"""Accepted without effect, and why."""

_SHOWN = 64  # characters of an unknown field's name that are compared and told

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class Unserved:
    """A field of the interface that this version does not serve. ``harmless`` values ask for nothing."""

    why: str
    harmless: tuple[object, ...] = ()


_NO_FUNCTIONS = "the older form of tools is not served"
_ONE_ANSWER = "one answer a request is given"
UNSERVED_CHAT: Mapping[str, Unserved] = {
    "n": Unserved(_ONE_ANSWER, (1,)),
    "response_format": Unserved("answers held to a form are not served by this version", ({"type": "text"},)),
    "parallel_tool_calls": Unserved("the number of calls cannot be limited by this version", (True,)),
    "functions": Unserved(_NO_FUNCTIONS, ([],)),
    "function_call": Unserved(_NO_FUNCTIONS, ("none",)),
    "modalities": Unserved("text alone is served", (["text"],)),
    "audio": Unserved("text alone is served"),
    "prediction": Unserved("predicted outputs are not served"),
    "web_search_options": Unserved("nothing is searched"),
    "verbosity": Unserved("the model is not told how much to say; ask it in a message", ("medium",)),
    "moderation": Unserved("nothing is moderated"),
}
UNSERVED_COMPLETION: Mapping[str, Unserved] = {
    "n": Unserved(_ONE_ANSWER, (1,)),
    "best_of": Unserved(_ONE_ANSWER, (1,)),
    "suffix": Unserved("text between two texts is not served by this version", ("",)),
}


@dataclass(frozen=True)
class Fields:
    """``sampling`` is for ``Engine.sampling``; ``logprobs`` is inside it."""

    sampling: Mapping[str, Any]
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatFields(Fields):
    """``options`` are variables of the chat template; ``tools`` is None where the model may call none."""

    messages: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    continue_last: bool = False


@dataclass(frozen=True)
class CompletionFields(Fields):
    """``prompt`` is text or token ids; ``parse_special``: markers of the vocabulary in its text are tokens."""

    prompt: str | list[int]
    echo: bool = False
    parse_special: bool = True


def read_chat(body: Mapping[str, Any]) -> ChatFields:
    """Raises ``FieldError`` (400) or ``NotServed`` (501), each naming the field."""
    given = _known(body, CHAT, UNSERVED_CHAT)
    if "messages" not in given:
        raise FieldError("messages", "missing", "send a list of objects with role and content")
    sampling = _sampling(given)
    limit = _max_tokens(given)
    if limit is not None:
        sampling["max_tokens"] = limit
    count = _chat_logprobs(given)
    if count is not None:
        sampling["logprobs"] = count
    return ChatFields(
        sampling=sampling,
        stream=_flag(given, "stream"),
        include_usage=_include_usage(given),
        messages=given["messages"],
        tools=_tools(given),
        options=_template_options(given),
        continue_last=_flag(given, "continue_final_message"),
    )


def read_completion(body: Mapping[str, Any]) -> CompletionFields:
    """Raises ``FieldError`` (400) or ``NotServed`` (501), each naming the field."""
    given = _known(body, COMPLETION, UNSERVED_COMPLETION)
    sampling = _sampling(given)
    for name in ("max_tokens", "logprobs"):
        if name in given:
            sampling[name] = given[name]
    echo = _flag(given, "echo")
    if echo and "logprobs" in given:
        raise NotServed("echo", "log-probabilities of the prompt are not served", "leave out echo or logprobs")
    return CompletionFields(
        sampling=sampling,
        stream=_flag(given, "stream"),
        include_usage=_include_usage(given),
        prompt=_prompt(given),
        echo=echo,
        parse_special=_flag(given, "parse_special", default=True),
    )


def _known(body: Mapping[str, Any], served: Sequence[str], unserved: Mapping[str, Unserved]) -> dict[str, Any]:
    """The served fields that say something (null says nothing)."""
    given: dict[str, Any] = {}
    for name, value in body.items():
        if name in served:
            if value is not None:
                given[name] = value
        elif name in unserved:
            if value is not None and not _is_one_of(value, unserved[name].harmless):
                raise NotServed(name, unserved[name].why, "leave it out")
        elif name not in IGNORED:
            raise FieldError(name[:_SHOWN], "no such field", _suggest(name[:_SHOWN], served), code="unknown_field")
    return given


def _is_one_of(value: object, harmless: Iterable[object]) -> bool:
    return any(type(value) is type(one) and value == one for one in harmless)


def _suggest(name: str, served: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, served, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else f"served: {', '.join(sorted(served))}"


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in SAMPLING if name in given}


def _flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise FieldError(name, f"{value!r} is not allowed", "allowed: true or false")
    return value


def _object(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise FieldError(name, f"{value!r} is not allowed", "send an object")
    return value


def _count(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FieldError(name, f"{value!r} is not allowed", f"allowed: a whole number from {low} to {high}")
    return value


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = _object(given, "stream_options")
    if options and not _flag(given, "stream"):
        raise FieldError("stream_options", "only a stream has them", "send stream: true, or leave them out")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise FieldError("stream_options", f"{name!r} is no such option", "known: include_usage")
    return _flag({name: value for name, value in options.items() if value is not None}, "include_usage")


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    newer = _count(given, "max_completion_tokens", 1, 1 << 31)
    older = _count(given, "max_tokens", 1, 1 << 31)
    if newer is not None and older is not None and newer != older:
        raise FieldError("max_tokens", f"{older} contradicts max_completion_tokens {newer}", "send one of the two")
    return newer if newer is not None else older


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = _flag(given, "logprobs")
    count = _count(given, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if count is not None and not wanted:
        raise FieldError("top_logprobs", "logprobs is not asked for", "send logprobs: true too")
    return (count or 0) if wanted else None


def _tools(given: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """The tools that the model may call, by ``tool_choice``."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise FieldError("tools", "not a list", 'send [{"type": "function", "function": {...}}]')
    choice = given.get("tool_choice", "auto")
    if choice == "none":
        return None
    if choice == "required" or isinstance(choice, Mapping):
        raise NotServed("tool_choice", "a call cannot be forced by this version", "use 'auto' or 'none'")
    if choice != "auto":
        raise FieldError("tool_choice", f"{choice!r} is not allowed", "allowed: auto, none")
    return tools or None


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """``reasoning_effort`` decides whether the template lets the model think; how much is the model's own."""
    options: dict[str, Any] = {}
    effort = given.get("reasoning_effort")
    if effort is not None:
        if effort not in EFFORTS:
            raise FieldError("reasoning_effort", f"{effort!r} is not allowed", f"allowed: {', '.join(EFFORTS)}")
        options["enable_thinking"] = effort != "none"
    return {**options, **_object(given, "chat_template_kwargs")}


def _prompt(given: Mapping[str, Any]) -> str | list[int]:
    """One prompt, as the four forms of the interface write it."""
    prompt = given.get("prompt", "")
    if isinstance(prompt, list) and prompt and not _is_ids(prompt):
        if len(prompt) > 1:
            raise NotServed("prompt", f"{len(prompt)} prompts in one request", "send one request a prompt")
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt)):
        return prompt
    raise FieldError("prompt", f"a {type(prompt).__name__} is not allowed", "send text or a list of token ids")


def _is_ids(prompt: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in prompt)
