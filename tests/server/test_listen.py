"""The address: loopback alone, mistakes in one line, and web pages kept out."""

from __future__ import annotations

import socket

import httpx
import pytest

from strata.errors import ConfigError
from strata.server.guard import is_loopback
from strata.server.listen import Server, bind
from tests.server.test_chat import ASK


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "", "127.0.0.1.evil.org"])
def test_other_addresses_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="no authentication yet"):
        bind(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_addresses_of_this_pc(host: str) -> None:
    with bind(host, 0) as bound:
        assert is_loopback(bound.getsockname()[0])


def test_ports() -> None:
    with pytest.raises(ConfigError, match="--port 70000 is no port"):
        bind("127.0.0.1", 70000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use") as caught:
            bind("127.0.0.1", port)
        assert caught.value.hint == f"use --port {port + 1}"


@pytest.mark.parametrize(
    ("headers", "served"),
    [
        ({}, True),
        ({"Host": "localhost:1234"}, True),
        ({"Host": "[::1]:80"}, True),
        ({"Host": "rebound.example:8080"}, False),
        ({"Host": "127.0.0.1.example"}, False),
        ({"Host": "[bad"}, False),
        ({"Origin": "http://localhost:3000"}, True),
        ({"Origin": "https://example.org"}, False),
        ({"Origin": "null"}, False),
    ],
)
def test_web_pages_are_kept_out(http: httpx.Client, headers: dict[str, str], served: bool) -> None:
    response = http.post("/v1/chat/completions", json=ASK, headers=headers)
    assert response.status_code == (200 if served else 403)
    if not served:
        assert response.json()["error"]["code"] == "forbidden"
        assert "access-control-allow-origin" not in response.headers


def test_two_servers_at_once(fake_server: Server, real_server: Server) -> None:
    assert fake_server.url != real_server.url
    assert httpx.get(f"{real_server.url}/v1/models").json()["data"][0]["id"] == "built-in-random"
