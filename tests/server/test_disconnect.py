"""A client that goes frees its place within a second, whatever the request was doing; others keep their order."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from strata.engine.engine import Engine
from strata.server.listen import Server
from strata.text.pipeline import TextPipeline
from tests.patience import PATIENCE_S
from tests.server.conftest import official_client, running, wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import ASK

LONG = [97] * 100_000


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request written by hand, so that its socket can be closed at any moment."""
    address = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)
    connection.sendall(head.encode() + data)
    return connection


def receive_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        assert part, "the server closed"
        data += part
    return data


def test_after_one_chunk(fake_server: Server, fake: FakeEngine) -> None:
    fake.script, fake.pause, fake.max_context = LONG, 0.01, 1 << 20
    connection = send(fake_server, "/v1/chat/completions", {**ASK, "stream": True})
    receive_until(connection, b'"content":"a"')
    connection.close()
    wait_until(fake.ended.is_set)
    assert fake.log == ["begin", "cancelled", "end"]


def test_after_one_chunk_by_the_official_client(client: openai.OpenAI, fake: FakeEngine) -> None:
    fake.script, fake.pause, fake.max_context = LONG, 0.01, 1 << 20
    with client.chat.completions.create(**ASK, stream=True) as stream:
        next(iter(stream))
    wait_until(fake.ended.is_set)
    assert fake.log[-2:] == ["cancelled", "end"]


@pytest.mark.parametrize("stream", [False, True])
def test_during_the_prompt(fake_server: Server, fake: FakeEngine, stream: bool) -> None:
    fake.hold = threading.Event()
    connection = send(fake_server, "/v1/chat/completions", {**ASK, "stream": stream})
    wait_until(lambda: "begin" in fake.log)
    connection.close()
    wait_until(fake.ended.is_set)
    assert fake.log == ["begin", "cancelled in the prompt", "end"]


def test_without_streaming(fake_server: Server, fake: FakeEngine) -> None:
    fake.script, fake.pause, fake.max_context = LONG, 0.01, 1 << 20
    connection = send(fake_server, "/v1/completions", {"prompt": "x", "max_tokens": 100_000})
    wait_until(lambda: "begin" in fake.log)
    connection.close()
    wait_until(fake.ended.is_set)
    assert fake.log == ["begin", "cancelled", "end"]


def test_while_waiting_for_its_turn(fake_server: Server, fake: FakeEngine) -> None:
    fake.hold = threading.Event()
    first = send(fake_server, "/v1/chat/completions", ASK)
    wait_until(lambda: "begin" in fake.log)
    second = send(fake_server, "/v1/chat/completions", ASK)
    wait_until(lambda: fake_server.answers.num_active == 2)
    second.close()
    fake.hold.set()
    receive_until(first, b"hello")
    first.close()
    wait_until(lambda: fake_server.answers.num_active == 0)
    assert fake.log == ["begin", "end", "begin", "cancelled", "end"]


def test_the_real_engine_forgets_who_left_the_queue(real_server: Server, real_engine: Engine) -> None:
    ask = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}
    first = send(real_server, "/v1/completions", ask)
    wait_until(lambda: real_engine.statistics().running == 1)
    cancelled = real_engine.statistics().cancelled
    second = send(real_server, "/v1/completions", ask)
    wait_until(lambda: real_engine.statistics().waiting == 1)
    second.close()
    wait_until(lambda: real_engine.statistics().cancelled == cancelled + 1)
    first.close()
    wait_until(lambda: real_engine.statistics().running == 0)


def test_the_real_engine_is_free_when_its_client_has_left(real_server: Server, real_engine: Engine) -> None:
    ask = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}

    def running_now() -> int:
        return real_engine.statistics().running

    for stream in (False, True):
        cancelled = real_engine.statistics().cancelled
        connection = send(real_server, "/v1/completions", {**ask, "stream": stream})
        wait_until(lambda: running_now() == 1)
        if stream:
            receive_until(connection, b"data: ")
        connection.close()
        wait_until(lambda: running_now() == 0)
        assert real_engine.statistics().cancelled == cancelled + 1
    with official_client(real_server) as client:
        assert client.completions.create(model="", prompt="y", max_tokens=2).usage is not None


def test_a_client_that_reads_slowly_holds_nobody_up(fake_server: Server, fake: FakeEngine, http: httpx.Client) -> None:
    fake.script, fake.max_context = [97] * 4_000, 1 << 20
    slow = send(fake_server, "/v1/completions", {"prompt": "x", "max_tokens": 4_000, "stream": True})
    receive_until(slow, b"data: ")
    wait_until(fake.ended.is_set)
    fake.script = [*b"quick", 258]
    assert http.post("/v1/chat/completions", json=ASK).json()["choices"][0]["message"]["content"] == "quick"
    slow.close()
    wait_until(lambda: fake_server.answers.num_active == 0)


def test_eight_at_once_equal_their_solo_runs(real_server: Server) -> None:
    def ask(length: int) -> str:
        with official_client(real_server) as client:
            answer = client.completions.create(
                model="", prompt=[70 + length] * length, max_tokens=6, stream=bool(length % 2),
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return "".join(chunk.choices[0].text for chunk in answer) if length % 2 else answer.choices[0].text

    solo = [ask(length) for length in range(1, 9)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: ask(n)})) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [together[n] for n in range(1, 9)] == solo


def test_stopping_ends_streams_without_a_reason(pipeline: TextPipeline) -> None:
    engine = FakeEngine(pipeline)
    engine.script, engine.pause, engine.max_context = LONG, 0.01, 1 << 20
    with running(engine) as server:
        stream = send(server, "/v1/chat/completions", {**ASK, "stream": True})
        receive_until(stream, b'"content":"a"')
        waiting = send(server, "/v1/chat/completions", ASK)
        wait_until(lambda: server.answers.num_active == 2)
        server.should_exit = True
        rest = receive_until(stream, b"0\r\n\r\n")
        assert b"the server is stopping" in rest
        assert b"[DONE]" not in rest
        assert b'"finish_reason":"' not in rest
        assert b" 503 " in receive_until(waiting, b"stopping")
