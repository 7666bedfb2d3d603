"""Faults as clients see them: a status before the first token, an event and no end after it; every route's own."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
import torch

from strata.engine.engine import Engine
from strata.errors import EngineError, RequestError
from strata.server import body
from strata.server.answers import Answers
from strata.server.body import MAX_BODY_BYTES
from strata.server.listen import Server
from tests.server.conftest import wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import ASK, sse


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token_a_status(client: openai.OpenAI, fake: FakeEngine, stream: bool) -> None:
    fake.raises = EngineError("row 3: logits are not finite", "strata verify finds which")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**ASK, stream=stream)
    assert caught.value.status_code == 500
    assert caught.value.type == "server_error"
    assert "row 3: logits are not finite" in caught.value.message


def test_after_the_first_token_an_event_and_no_end(http: httpx.Client, fake: FakeEngine) -> None:
    fake.raises, fake.raises_at = EngineError("a worker died"), 3
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    *chunks, error = sse(response)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hel"
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert error == {
        "error": {"message": "a worker died", "type": "server_error", "param": None, "code": "engine_error"}
    }


def test_after_the_first_token_the_official_client_raises(client: openai.OpenAI, fake: FakeEngine) -> None:
    fake.raises, fake.raises_at = EngineError("a worker died"), 2
    for create in (
        lambda: client.chat.completions.create(**ASK, stream=True),
        lambda: client.completions.create(model="fake", prompt="x", stream=True),
    ):
        stream = create()
        with pytest.raises(openai.APIError, match="a worker died"):
            list(stream)
    with pytest.raises(openai.InternalServerError, match="a worker died"):
        client.chat.completions.create(**ASK)
    fake.raises = None
    assert client.chat.completions.create(**ASK).choices[0].message.content == "hello"


def test_what_nobody_foresaw_is_one_line_too(
    client: openai.OpenAI, fake: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    fake.raises = ZeroDivisionError("by nought")
    with pytest.raises(openai.InternalServerError, match="unexpected ZeroDivisionError: by nought"):
        client.chat.completions.create(**ASK)
    assert "an answer ended unexpectedly" in caplog.text


def test_health_tells_of_the_last_fault_until_an_answer_ends_well(
    http: httpx.Client, client: openai.OpenAI, fake: FakeEngine, fake_server: Server
) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    fake.raises = EngineError("a worker died")
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**ASK)
    wait_until(lambda: fake_server.answers.num_active == 0)
    assert http.get("/health").json() == {"status": "degraded", "reason": "a worker died"}
    fake.raises = None
    client.chat.completions.create(**ASK)
    wait_until(lambda: fake_server.answers.num_active == 0)
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("extra", "fits"), [(-1, True), (0, True), (1, False)])
def test_prompts_around_the_context(real_client: openai.OpenAI, extra: int, fits: bool, stream: bool) -> None:
    ask: dict[str, Any] = {"model": "", "prompt": [65] * (256 + extra), "max_tokens": 4}
    if fits:
        answer = real_client.completions.create(**ask, stream=stream)
        last = list(answer)[-1] if stream else answer
        assert last.choices[0].finish_reason in ("length", "stop")
        return
    with pytest.raises(openai.BadRequestError, match="the prompt has 257 tokens, the context holds 256") as caught:
        real_client.completions.create(**ask, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_longer_than_the_context(real_client: openai.OpenAI, stream: bool) -> None:
    messages = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(openai.BadRequestError, match=r"the prompt has 3\d\d tokens, the context holds 256"):
        real_client.chat.completions.create(model="", messages=messages, stream=stream)  # type: ignore[arg-type]


def test_logits_that_are_not_finite_end_the_request(real_client: openai.OpenAI, real_engine: Engine) -> None:
    weight = next(value for name, value in real_engine.model.dense().items() if name.endswith("norm.weight"))
    assert isinstance(weight, torch.Tensor)
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="logits are not finite"):
                real_client.completions.create(model="", prompt="x", stream=stream)
    finally:
        weight.copy_(kept)
    assert real_client.completions.create(model="", prompt="x", max_tokens=2).choices[0].finish_reason == "length"


def test_a_template_refuses_in_its_own_words(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "be kind"}
    with pytest.raises(openai.BadRequestError, match="A system message can only come first") as caught:
        client.chat.completions.create(model="fake", messages=[*ASK["messages"], system])
    assert caught.value.code == "chat_template_refused"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.chat.completions.create(**{**ASK, "model": "gpt-9"}),
        lambda: client.completions.create(model="gpt-9", prompt="x"),
        lambda: client.models.retrieve("gpt-9"),
    ):
        with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served \\(served: fake\\)") as caught:
            ask()
        assert caught.value.code == "model_not_found"
    assert client.chat.completions.create(**{**ASK, "model": ""}).model == "fake"


@pytest.mark.parametrize(
    "path", ["responses", "messages", "embeddings", "audio/speech", "responses/abc/cancel", "files"]
)
def test_routes_that_are_not_served_say_so(http: httpx.Client, path: str) -> None:
    for response in (http.post(f"/v1/{path}", json={}), http.get(f"/v1/{path}")):
        assert response.status_code == 501
        assert response.json()["error"]["message"].startswith(f"/v1/{path}: not served by this version")


def test_routes_that_nobody_knows(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    response = http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert "GET /v1/chat/completions: Method Not Allowed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the request is not JSON"),
        (b"{", "the request is not JSON"),
        (b"\xff\xfe{}", "the request is not JSON"),
        (b"[" * 100_000, "the request is not JSON"),
        (b"[1]", "a JSON list, not an object"),
        (b'{"model": 3}', "model: 3 is not allowed"),
        (b'{"messages": [], "temperature": NaN}', "temperature: nan is not allowed"),
    ],
)
def test_bodies_that_are_no_requests(http: httpx.Client, content: bytes, words: str) -> None:
    response = http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    message = json.loads(response.content)["error"]["message"]
    assert words.replace("\\", "") in message


def test_a_body_without_end(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 1 << 20)
    response = http.post("/v1/completions", content=b" " * ((1 << 20) + 1))
    assert response.status_code == 413
    assert MAX_BODY_BYTES == 32 << 20


def test_a_full_queue_asks_to_come_again(http: httpx.Client, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.server.answers.MAX_REQUESTS", 0)
    response = http.post("/v1/chat/completions", json=ASK)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_views(http: httpx.Client, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    status = http.get("/v1/status").json()
    assert (status["model"], status["max_context"], status["plan"]) == ("fake", 64, ["plan: nothing"])
    assert status["version"].startswith("strata ")
    assert status["statistics"]["parts"] == {"loaded_bytes": 7}
    rows = {row["option"]: row for row in status["configuration"]}
    assert (rows["--pcie-frac"]["in_force"], rows["--pcie-frac"]["why"]) == (False, "no card")
    assert "runs to the end of its context" in rows["--max-tokens"]["why"]
    metrics = http.get("/metrics").text
    assert "# TYPE strata_requests_total counter" in metrics
    assert "# TYPE strata_running gauge" in metrics
    assert "strata_parts_loaded_bytes_total 7.0" in metrics


def test_the_real_engines_views(real_server: Server) -> None:
    status = httpx.get(f"{real_server.url}/v1/status").json()
    assert status["statistics"]["runtime"]["experts"]["num_calls"] >= 0
    assert any("RAM mode" in line for line in status["plan"])
    assert "strata_runtime_experts_hits_total" in httpx.get(f"{real_server.url}/metrics").text


def test_no_answer_begins_once_the_server_stops(pipeline: Any) -> None:
    answers = Answers(FakeEngine(pipeline))
    answers.stop()
    engine = answers.engine
    with pytest.raises(RequestError, match="the server is stopping"):
        answers.start(engine.plain_request("x", engine.sampling()))
