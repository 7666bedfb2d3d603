"""Real servers on free loopback ports: one over the built-in random model, and one over an engine that does as told."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from strata.engine.engine import Engine
from strata.server.listen import Server, bind
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.pipeline import TextPipeline
from tests.patience import PATIENCE_S
from tests.server.fake_engine import FakeEngine


@contextlib.contextmanager
def running(engine: Any) -> Iterator[Server]:
    """A server in a thread; stopped, and its thread ended, when the block ends."""
    with bind("127.0.0.1", 0) as bound:
        server = Server(engine, bound)
        thread = threading.Thread(target=server.run_here)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield server
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE_S) -> float:
    """Seconds until ``holds``; fails after ``seconds``."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "waited too long"
        time.sleep(0.005)
    return time.monotonic() - began


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> TextPipeline:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return TextPipeline.from_directory(folder)


@pytest.fixture(scope="module")
def fake_server(pipeline: TextPipeline) -> Iterator[Server]:
    with running(FakeEngine(pipeline)) as server:
        yield server


@pytest.fixture
def fake(fake_server: Server, pipeline: TextPipeline) -> FakeEngine:
    """The module's fake engine, as new."""
    engine = fake_server.answers.engine
    assert isinstance(engine, FakeEngine)
    wait_until(lambda: fake_server.answers.num_active == 0)
    engine.__init__(pipeline)  # type: ignore[misc]
    fake_server.answers.last_error = None
    return engine


@pytest.fixture
def http(fake_server: Server, fake: FakeEngine) -> Iterator[httpx.Client]:
    """Raw HTTP to the fake."""
    with httpx.Client(base_url=fake_server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def client(fake_server: Server, fake: FakeEngine) -> Iterator[openai.OpenAI]:
    """The official client on the fake; it repeats nothing by itself."""
    with official_client(fake_server) as client:
        yield client


def official_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def real_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server-home")


@pytest.fixture(scope="session")
def real_engine(real_home: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_HOME", str(real_home))
        engine = Engine.load("built-in-random", max_context=256, ram_gib=6)
    with engine:
        yield engine


@pytest.fixture(scope="session")
def real_server(real_engine: Engine) -> Iterator[Server]:
    with running(real_engine) as server:
        yield server


@pytest.fixture
def real_client(real_server: Server) -> Iterator[openai.OpenAI]:
    with official_client(real_server) as client:
        yield client
