"""Chat completions through the official client: whole, streamed, with tools, reasoning and log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from strata.text.control_text import Segment
from tests.server.fake_engine import END, FakeEngine

ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
CALL = "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>"


def script_of(engine: FakeEngine, text: str) -> list[int]:
    """The tokens that say ``text``, its markers as the control tokens that they are, and the end."""
    return [*engine.text.tokenizer.encode_segments([Segment(text, markers=True)]), END]


def sse(response: httpx.Response) -> list[Any]:
    """The data of every event, the end mark as it is."""
    events = [block for block in response.text.split("\n\n") if block]
    assert all(event.startswith("data: ") for event in events)
    return [word if (word := event.removeprefix("data: ")) == "[DONE]" else json.loads(word) for event in events]


def test_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "stop")
    assert (choice.message.tool_calls, choice.logprobs) == (None, None)
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, 6, 27)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_order_of_a_stream(http: httpx.Client) -> None:
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, reason, usage, done = sse(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (21, 6)
    assert reason["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    for chunk in chunks:
        assert chunk["choices"][0]["finish_reason"] is None
    assert all(chunk["usage"] is None for chunk in [*chunks, reason])


def test_length(client: openai.OpenAI, fake: FakeEngine) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(**ASK, **{field: 3})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hel", "length")
        chunks = list(client.chat.completions.create(**ASK, **{field: 3}, stream=True))
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    client.chat.completions.create(**ASK)
    assert fake.seen[-1].params.max_tokens == fake.max_context, "a chat answer runs to its context's end"


def test_stop_strings(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, stop=["ll", "x"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("he", "stop")
    chunks = list(client.chat.completions.create(**ASK, stop="ll", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "he"


def test_characters_are_never_cut(http: httpx.Client, fake: FakeEngine) -> None:
    fake.script = [*"a😀東京".encode(), END]
    chunks = sse(http.post("/v1/chat/completions", json={**ASK, "stream": True, "logprobs": True}))[:-1]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == "a😀東京"
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: openai.OpenAI, fake: FakeEngine, stream: bool) -> None:
    fake.max_context = 4096
    fake.script = script_of(fake, "Let me see." + CALL)
    if stream:
        chunks = list(client.chat.completions.create(**ASK, tools=[TOOL], stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == "Let me see."
        assert calls[0].index == 0
    else:
        answer = client.chat.completions.create(**ASK, tools=[TOOL])
        assert answer.choices[0].finish_reason == "tool_calls"
        assert (answer.choices[0].message.content or "").strip() == "Let me see."
        calls = list(answer.choices[0].message.tool_calls or [])
    assert len(calls) == 1
    function = calls[0].function
    assert calls[0].type == "function"
    assert (calls[0].id or "").startswith("call_")
    assert function.name == "look"
    assert json.loads(function.arguments) == {"at": "the sky"}


def test_a_tool_conversation_goes_on(client: openai.OpenAI, fake: FakeEngine) -> None:
    fake.max_context = 4096
    fake.script = script_of(fake, CALL)
    first = client.chat.completions.create(**ASK, tools=[TOOL]).choices[0].message
    assert first.content is None
    fake.script = [*b"blue", END]
    call = (first.tool_calls or [])[0]
    messages = [*ASK["messages"], first, {"role": "tool", "tool_call_id": call.id, "content": "it is blue"}]
    answer = client.chat.completions.create(model="fake", messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "blue"
    prompt = fake.text.tokenizer.decode(fake.seen[-1].ids, show_hidden=True)
    assert "<function=look>" in prompt
    assert "it is blue" in prompt


def test_tool_choice(client: openai.OpenAI, fake: FakeEngine) -> None:
    fake.max_context = 4096
    client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="auto")
    assert fake.options["tools"] == [TOOL]
    client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="none")
    assert fake.options["tools"] is None
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        with pytest.raises(openai.InternalServerError, match="tool_choice: a call cannot be forced") as caught:
            client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=choice)
        assert caught.value.status_code == 501
    with pytest.raises(openai.BadRequestError, match="tool_choice: 'sometimes' is not allowed"):
        client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="sometimes")


def test_tools_of_a_model_that_has_none(
    client: openai.OpenAI, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.text, "tool_format", None)
    with pytest.raises(openai.InternalServerError, match="no tool calls that are read"):
        client.chat.completions.create(**ASK, tools=[TOOL])


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(http: httpx.Client, fake: FakeEngine, stream: bool) -> None:
    fake.script = script_of(fake, "<think>\nhm\n</think>\n\nyes")
    response = http.post("/v1/chat/completions", json={**ASK, "stream": stream})
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in sse(response)[:-1]]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
    else:
        message = response.json()["choices"][0]["message"]
        reasoning, content = message["reasoning_content"], message["content"]
        assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert (reasoning.strip(), content.strip()) == ("hm", "yes")


def test_reasoning_effort_opens_and_closes_thinking(client: openai.OpenAI, fake: FakeEngine) -> None:
    for effort, thinking in (("none", False), ("low", True), ("high", True)):
        client.chat.completions.create(**ASK, reasoning_effort=effort)
        assert fake.options["options"] == {"enable_thinking": thinking}
    client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert fake.options["options"] == {"enable_thinking": False}
    assert fake.text.tokenizer.decode(fake.seen[-1].ids, show_hidden=True).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, fake: FakeEngine, stream: bool) -> None:
    fake.script = [*"hé".encode(), END]
    if stream:
        chunks = list(client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, stream=True))
        found = [
            one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or []
        ]
    else:
        logprobs = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert logprobs is not None
        found = list(logprobs.content or [])
    assert [one.token for one in found] == ["h", "bytes:\\xc3", "bytes:\\xa9"], "one entry a token, the end left out"
    assert bytes(byte for one in found for byte in one.bytes or []).decode() == "hé"
    assert [one.logprob for one in found] == [-0.5] * 3
    assert [(top.token, top.logprob) for top in found[0].top_logprobs] == [("h", -0.5), ("A", -1.5)]


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    logprobs = client.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs
    assert logprobs is not None
    assert [one.top_logprobs for one in logprobs.content or []] == [[]] * 5


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, fake: FakeEngine) -> None:
    more = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    client.chat.completions.create(
        **ASK, temperature=0.5, top_p=0.9, seed=3, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={"65": -5},
        max_tokens=9, extra_body=more,
    )  # fmt: skip
    params = fake.seen[-1].params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.9, 3, 9)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.1, 0.2, {65: -5.0})
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((7,), True, 2)


def test_a_final_message_is_continued(client: openai.OpenAI, fake: FakeEngine) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "Well, "}]
    client.chat.completions.create(model="fake", messages=messages, extra_body={"continue_final_message": True})
    assert fake.text.tokenizer.decode(fake.seen[-1].ids, show_hidden=True).endswith("assistant\nWell, ")


def test_the_real_model_says_the_same_whole_and_streamed(real_client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "built-in-random", "messages": ASK["messages"], "max_tokens": 12, "seed": 1}
    whole = real_client.chat.completions.create(**ask)
    chunks = list(real_client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    again = real_client.chat.completions.create(**{**ask, "model": ""}, logprobs=True, top_logprobs=3)
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.choices[0].logprobs is not None
    first = (again.choices[0].logprobs.content or [])[0]
    assert first.logprob == first.top_logprobs[0].logprob, "greedy takes the likeliest"
    assert len(first.top_logprobs) == 3
