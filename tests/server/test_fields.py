"""Every field of the interface is served, ignored by name, or refused by name; nothing is dropped silently."""

from __future__ import annotations

import inspect
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from strata.errors import RequestError
from strata.server.faults import FieldError, NotServed
from strata.server.fields import (
    CHAT,
    COMPLETION,
    IGNORED,
    UNSERVED_CHAT,
    UNSERVED_COMPLETION,
    read_chat,
    read_completion,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def test_every_field_of_the_official_client_has_its_place() -> None:
    chat = set(inspect.get_annotations(chat_params.CompletionCreateParamsBase)) | {"stream"}
    assert chat <= {*CHAT, *IGNORED, *UNSERVED_CHAT}
    completion = set(inspect.get_annotations(completion_params.CompletionCreateParamsBase)) | {"stream"}
    assert completion <= {*COMPLETION, *IGNORED, *UNSERVED_COMPLETION}


def test_no_field_has_two_places() -> None:
    for served, unserved in ((CHAT, UNSERVED_CHAT), (COMPLETION, UNSERVED_COMPLETION)):
        assert len({*served, *IGNORED, *unserved}) == len(served) + len(IGNORED) + len(unserved)


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_fields_change_nothing(name: str) -> None:
    assert read_chat({"messages": MESSAGES, name: "anything"}) == read_chat({"messages": MESSAGES})
    assert read_completion({"prompt": "x", name: {"a": 1}}) == read_completion({"prompt": "x"})


@pytest.mark.parametrize("name", sorted({*CHAT, *UNSERVED_CHAT} - {"messages"}))
def test_null_says_nothing(name: str) -> None:
    assert read_chat({"messages": MESSAGES, name: None}) == read_chat({"messages": MESSAGES})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("parallel_tool_calls", False),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("moderation", {}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_chat_fields_that_are_not_served_say_so(name: str, value: Any) -> None:
    with pytest.raises(NotServed) as caught:
        read_chat({"messages": MESSAGES, name: value})
    assert (caught.value.http_status, caught.value.param) == (501, name)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "value"), [("n", 3), ("best_of", 2), ("suffix", "end")])
def test_completion_fields_that_are_not_served_say_so(name: str, value: Any) -> None:
    with pytest.raises(NotServed, match=f"^{name}: "):
        read_completion({"prompt": "x", name: value})


@pytest.mark.parametrize("name", sorted(UNSERVED_CHAT))
def test_values_that_ask_for_nothing_are_taken(name: str) -> None:
    for value in UNSERVED_CHAT[name].harmless:
        read_chat({"messages": MESSAGES, name: value})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_all": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"continue_final_message": "x"}, "continue_final_message"),
    ],
)
def test_mistakes_name_their_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_chat(body if not body or "prompt" in body else {"messages": MESSAGES, **body})
    assert (caught.value.http_status, caught.value.param) == (400, param)


def test_a_slip_of_the_pen_is_told() -> None:
    with pytest.raises(RequestError, match="did you mean temperature"):
        read_chat({"messages": MESSAGES, "temprature": 1})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"tools": [{}]}, "tools[0]"),
    ],
)
def test_the_engines_refusals_name_the_field_too(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_refusals_reach_the_official_client(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
    with pytest.raises(openai.InternalServerError, match="n: one answer a request is given") as unserved:
        client.chat.completions.create(**ask, n=2)
    assert unserved.value.status_code == 501
    assert unserved.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(**ask, extra_body={"beam_width": 4})
    assert (unknown.value.param, unknown.value.code) == ("beam_width", "unknown_field")
