"""Bodies of requests: halves of characters named by field, large texts that hold nobody up, markers of raw prompts."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.engine import Engine
from strata.errors import RequestError
from strata.server.body import _StepwiseDecoder, parse_body
from strata.server.faults import FieldError
from strata.server.listen import Server
from strata.text import tokenizer as tokenizer_file
from tests.server.conftest import running
from tests.server.fake_engine import FakeEngine

HALF = "\\ud83d"
USER = '{"role": "user", "content": "x"}'
BODIES = {
    "messages[0].content": f'{{"messages": [{{"role": "user", "content": "ab{HALF}"}}]}}',
    "messages[1].content[0].text": f'{{"messages": [{USER}, {{"content": [{{"text": "{HALF}"}}]}}]}}',
    "messages[0].tool_calls[0].function.arguments.a": (
        '{"messages": [{"tool_calls": [{"function": {"arguments": {"a": "\\udc00"}}}]}]}'
    ),
    "tools[0].function.description": f'{{"tools": [{{"function": {{"description": "{HALF}!"}}}}]}}',
    "metadata.user": f'{{"metadata": {{"user": "{HALF}"}}}}',
    'metadata["a b"]': f'{{"metadata": {{"a b": "{HALF}"}}}}',
    "stop[1]": f'{{"stop": ["a", "{HALF}{HALF}"]}}',
    "model": f'{{"model": "{HALF}"}}',
    "nobody_knows_this.x[0]": f'{{"nobody_knows_this": {{"x": ["{HALF}"]}}}}',
    # Names
    '["\\ud83d"]': f'{{"{HALF}": 1}}',
    'metadata["a\\ud83d"]': f'{{"metadata": {{"a{HALF}": 1}}}}',
    'tools[0].function.parameters.properties["\\udfff"]': (
        '{"tools": [{"function": {"parameters": {"properties": {"\\udfff": {}}}}}]}'
    ),
}


@pytest.mark.parametrize("field", BODIES)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(field: str, route: str, http: httpx.Client) -> None:
    response = http.post(f"/v1/{route}", content=BODIES[field].encode())
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: ")
    assert "half a surrogate pair" in error["message"]


def test_half_a_pair_written_in_bytes_and_whole_pairs() -> None:
    with pytest.raises(FieldError, match="prompt: half a surrogate pair, U\\+D83D, at character 1"):
        parse_body(b'{"prompt": "a\xed\xa0\xbd"}')
    assert parse_body(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "😀"}
    assert parse_body('\ufeff{"a": 1}'.encode()) == {"a": 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@settings(max_examples=100)
@given(json_values, st.integers(0, 3), st.sampled_from([None, "}", ",", "{", "\x01"]), st.sampled_from([0, 1 << 30]))
def test_a_large_body_is_read_as_a_small_one(value: Any, indent: int, damage: str | None, escapes: int) -> None:
    text = json.dumps(value, indent=indent or None)
    if damage is not None:
        text = text[: len(text) // 2] + damage + text[len(text) // 2 :]
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            _StepwiseDecoder(escapes).decode(text)
    else:
        assert _StepwiseDecoder(escapes).decode(text) == expected


def test_a_body_of_many_small_parts_is_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Seen(_StepwiseDecoder):
        def __init__(self, num_escapes: int) -> None:
            used.append(num_escapes)
            super().__init__(num_escapes)

    monkeypatch.setattr("strata.server.body._StepwiseDecoder", Seen)
    body = parse_body(b'{"a": "\\n\\n", "prompt": [' + b"1," * 600_000 + b"1]}")
    assert len(body["prompt"]) == 600_001
    assert used == [2]


def test_health_answers_while_a_large_text_is_encoded(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: answers that began and ended while the library was encoding. It kept 8 MB waiting for 5 s."""
    encode, begun, ended = tokenizer_file._ids, threading.Event(), threading.Event()

    def seen(library: Any, text: str) -> list[int]:
        if len(text) < 1 << 20:
            return encode(library, text)
        begun.set()
        try:
            return encode(library, text)
        finally:
            ended.set()

    monkeypatch.setattr(tokenizer_file, "_ids", seen)
    response: list[httpx.Response] = []
    body = {"messages": [{"role": "user", "content": "a line of text\n" * (2 << 20 >> 4)}]}
    with running(FakeEngine(pipeline)) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        ask = threading.Thread(
            target=lambda: response.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300))
        )
        ask.start()
        assert begun.wait(timeout=120)
        count = 0
        while not ended.is_set():
            assert client.get("/health").status_code == 200
            count += not ended.is_set()
        ask.join()
    assert count >= 3
    assert response[0].status_code == 400
    assert response[0].json()["error"]["code"] == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    real_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = len("</tool_response>")  # the longest token of the built-in vocabulary, in bytes
    words = f"at least {real_engine.max_context + 1} tokens, the context holds {real_engine.max_context}"

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(tokenizer_file, "_ids", never)
    text = "a" * (longest * real_engine.max_context + 1)
    for ask in (
        lambda: real_engine.plain_request(text, real_engine.sampling()),
        lambda: real_engine.chat_request([{"role": "user", "content": text}], real_engine.sampling()),
    ):
        with pytest.raises(RequestError, match="at least") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=words):
        real_engine.plain_request(text, real_engine.sampling())
    with pytest.raises(AssertionError, match="encoded"):
        real_engine.plain_request(text[:-1], real_engine.sampling())


def test_markers_of_a_raw_prompt_are_tokens_unless_it_says_otherwise(http: httpx.Client, fake: FakeEngine) -> None:
    for more, expected in (({}, (257,)), ({"parse_special": True}, (257,)), ({"parse_special": False}, None)):
        fake.seen.clear()
        response = http.post("/v1/completions", json={"prompt": "<|im_start|>", "max_tokens": 2, **more})
        assert response.status_code == 200
        assert fake.seen[0].ids == (expected or tuple(b"<|im_start|>"))
    response = http.post("/v1/completions", json={"prompt": "x", "parse_special": "no"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "parse_special")
    response = http.post("/v1/chat/completions", json={"messages": [json.loads(USER)], "parse_special": True})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_field")


def test_the_real_engine_reads_markers_of_a_raw_prompt(real_server: Server, real_engine: Engine) -> None:
    params = real_engine.sampling()
    assert real_engine.plain_request("<|im_start|>a", params).ids == (257, 97)
    assert real_engine.plain_request("<|im_start|>a", params, parse_special=False).ids == tuple(b"<|im_start|>a")
    chat = real_engine.chat_request([{"role": "user", "content": "<|im_start|>"}], params)
    assert chat.ids.count(257) == 2  # the template's own two
