"""Binds the address, runs the application until it is told to end, and ends in order.

Lives in ``server``: the only file that knows sockets and signals. Loopback alone is bound, because nobody is asked who
he is. It must not know routes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from strata.errors import ConfigError
from strata.server.answers import Answers
from strata.server.app import build_app
from strata.server.guard import is_loopback
from strata.server.served import ServedEngine

__all__ = ["Server", "bind", "serve"]

logger = logging.getLogger(__name__)

# Answers are cancelled first, so what is waited for is a last write; a client that does not read is not waited for.
SHUTDOWN_SECONDS = 3


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a mistake shows before a model is loaded.

    ``port`` 0 takes a free one. Raises ``ConfigError``.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"--host {host}: only this PC is served, since there is no authentication yet",
            "use 127.0.0.1, and a tunnel (ssh -L) from elsewhere",
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is no port", "give 1 to 65535, or 0 for a free one")
    address = "127.0.0.1" if host.lower() == "localhost" else host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{host}:{port} is in use by another program", f"use --port {port + 1}") from None
        raise ConfigError(f"{host}:{port} cannot be bound: {error.strerror}", "use another --host or --port") from None
    return bound


class Server(uvicorn.Server):
    """One application on one socket. ``run_here`` returns when ``should_exit`` was set or a signal came."""

    def __init__(self, engine: ServedEngine, bound: socket.socket) -> None:
        self.answers = Answers(engine)
        self._bound = bound
        super().__init__(
            uvicorn.Config(
                build_app(self.answers),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )

    @property
    def url(self) -> str:
        host, port = self._bound.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run_here(self) -> None:
        """Serves in this thread."""
        with _library_messages():
            self.run(sockets=[self._bound])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The library's own, but a Ctrl-C that whoever started the program ignores stays ignored."""
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with super().capture_signals():
            if is_ignored and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info("serving %s at %s/v1; Ctrl-C ends", self.answers.engine.name, self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.answers.stop()
        await super().shutdown(sockets)


def serve(engine: ServedEngine, bound: socket.socket) -> None:
    """Serves until Ctrl-C (``KeyboardInterrupt``) or SIGTERM (``SystemExit`` with 143), after an orderly end."""
    server = Server(engine, bound)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # called when the server has ended, which takes the signal itself before
    server.run_here()


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class _Forward(logging.Handler):
    """Hands the server library's warnings to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


@contextlib.contextmanager
def _library_messages() -> Iterator[None]:
    library, handler = logging.getLogger("uvicorn"), _Forward()
    library.addHandler(handler)
    library.setLevel(logging.WARNING)
    library.propagate = False
    try:
        yield
    finally:
        library.removeHandler(handler)
