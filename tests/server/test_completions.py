"""Plain completions through the official client: forms of the prompt, echo, log-probabilities, ends."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.fake_engine import END, FakeEngine

ASK: dict[str, Any] = {"model": "fake", "prompt": "say: "}


def test_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(**ASK)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)
    chunks = list(client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    *texts, reason, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == "hello"
    assert {chunk.choices[0].finish_reason for chunk in texts} == {None}
    assert (reason.choices[0].text, reason.choices[0].finish_reason) == ("", "stop")
    assert usage.choices == []
    assert usage.usage == answer.usage


@pytest.mark.parametrize("prompt", ["say: ", ["say: "], list(b"say: "), [list(b"say: ")]])
def test_forms_of_a_prompt(client: openai.OpenAI, fake: FakeEngine, prompt: Any) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, echo=True)
    assert answer.choices[0].text == "say: hello"
    assert fake.seen[-1].ids == tuple(b"say: ")
    chunks = list(client.completions.create(model="fake", prompt=prompt, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "say: hello"


@pytest.mark.parametrize(("prompt", "status"), [(["a", "b"], 501), ([[1], [2]], 501), ([], 400), ("", 400), (3, 400)])
def test_prompts_that_are_not_taken(client: openai.OpenAI, prompt: Any, status: int) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="fake", prompt=prompt)
    assert caught.value.status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**ASK, logprobs=2, stream=True)]
        tokens = [token for one in chunks if one for token in one.tokens or []]
        offsets = [offset for one in chunks if one for offset in one.text_offset or []]
        tops = [top for one in chunks if one for top in one.top_logprobs or []]
    else:
        logprobs = client.completions.create(**ASK, logprobs=2).choices[0].logprobs
        assert logprobs is not None
        tokens, offsets, tops = logprobs.tokens or [], logprobs.text_offset or [], logprobs.top_logprobs or []
        assert logprobs.token_logprobs == [-0.5] * 5
    assert tokens == list("hello")
    assert offsets == [0, 1, 2, 3, 4]
    assert tops[0] == {"h": -0.5, "A": -1.5}


def test_of_two_tokens_with_one_text_the_likelier_counts(client: openai.OpenAI, fake: FakeEngine) -> None:
    fake.script = [*b"A", END]  # the fake's second alternative is A too
    logprobs = client.completions.create(**ASK, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"A": -0.5}]


def test_echo_with_logprobs_says_why_not(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="echo: log-probabilities of the prompt are not served"):
        client.completions.create(**ASK, echo=True, logprobs=1)


def test_length_and_default(client: openai.OpenAI, fake: FakeEngine) -> None:
    assert client.completions.create(**ASK, max_tokens=2).choices[0].finish_reason == "length"
    client.completions.create(**ASK)
    assert fake.seen[-1].params.max_tokens == 16, "the engine's own default"


def test_the_real_model_repeats_itself(real_client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "built-in-random", "prompt": "def f(x):", "max_tokens": 8}
    whole = real_client.completions.create(**ask)
    chunks = list(real_client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    tokens = real_client.completions.create(**{**ask, "prompt": list(b"def f(x):")})
    assert tokens.choices[0].text == whole.choices[0].text
