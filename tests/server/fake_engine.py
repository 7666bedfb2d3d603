"""An engine that does as it is told: what it says, when, and what goes wrong. It fits ``ServedEngine``."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from strata.config import Requested
from strata.config_sources import Effect
from strata.engine.cancellation import Cancellation
from strata.engine.engine import Request, Usage
from strata.engine.generation import Piece
from strata.engine.sampler import Choice
from strata.engine.sampling_params import SamplingParams
from strata.errors import RequestError
from strata.text.pipeline import TextPipeline

END = 258  # <|im_end|> of the byte tokenizer


@dataclasses.dataclass(frozen=True)
class FakeStatistics:
    requests: int
    waiting: int
    running: int
    parts: dict[str, float]


class FakeEngine:
    """Answers with ``script``, one token at a time, through the request's real stream, ``pause`` seconds apart.

    ``raises`` is raised in place of token number ``raises_at`` (0: during the prompt). ``hold`` makes every prompt wait
    until it is set or the request cancelled. ``log`` tells what happened in which order.
    """

    def __init__(self, text: TextPipeline) -> None:
        self.requested = Requested()
        self.text = text
        self.name = "fake"
        self.max_context = 64
        self.script: list[int] = [*b"hello", END]
        self.pause = 0.0
        self.raises: BaseException | None = None
        self.raises_at = 0
        self.hold: threading.Event | None = None
        self.log: list[str] = []
        self.seen: list[Request] = []
        self.options: dict[str, Any] = {}
        self.ended = threading.Event()
        self._turn = threading.Lock()
        self._running = 0

    def sampling(self, given: Mapping[str, Any] | None = None) -> SamplingParams:
        return SamplingParams.from_request(dict(given or {}), {"temperature": 0.0, "max_tokens": 16})

    def plain_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, parse_special: bool = True
    ) -> Request:
        encode = self.text.tokenizer.encode
        ids = encode(prompt, markers=parse_special) if isinstance(prompt, str) else list(prompt)
        return self._checked(Request(tuple(ids), params, self.text.plain_stream(stop=params.stop)))

    def chat_request(self, messages: Any, params: SamplingParams, **how: Any) -> Request:
        self.options = how
        prompt = self.text.chat(messages, **how)
        return self._checked(Request(prompt.ids, params, self.text.chat_stream(prompt, stop=params.stop)))

    def _checked(self, request: Request) -> Request:
        if not request.ids:
            raise RequestError("the prompt is empty")
        if len(request.ids) > self.max_context:
            raise RequestError(f"{len(request.ids)} tokens, {self.max_context} fit", code="context_length_exceeded")
        return request

    def submit(
        self,
        request: Request,
        *,
        cancellation: Cancellation | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> Iterator[Piece]:
        assert cancellation is not None
        assert on_usage is not None
        with self._turn:
            self.seen.append(request)
            self.log.append("begin")
            self._running = 1
            count = 0
            try:
                for piece in self._pieces(request, cancellation):
                    count += piece.choice is not None
                    yield piece
            finally:
                self._running = 0
                self.log.append("end")
                self.ended.set()
                on_usage(Usage(len(request.ids), 3, count, 0.1, 0.2, count - 1))

    def _pieces(self, request: Request, cancellation: Cancellation) -> Iterator[Piece]:
        while self.hold is not None and not self.hold.is_set():
            if cancellation.cancelled:
                self.log.append("cancelled in the prompt")
                yield Piece((), None, "cancelled")
                return
            time.sleep(0.01)
        for number, token in enumerate(self.script):
            if self.raises is not None and number == self.raises_at:
                raise self.raises
            if cancellation.cancelled:
                self.log.append("cancelled")
                yield Piece((), None, "cancelled")
                return
            events = request.stream.push(token)
            if request.stream.finish is None and number + 1 == (request.params.max_tokens or 1 << 30):
                events = [*events, *request.stream.close()]
            finish = request.stream.finish
            yield Piece(tuple(events), self._choice(token, request), finish.reason if finish else None)
            if finish is not None:
                return
            time.sleep(self.pause)

    def _choice(self, token: int, request: Request) -> Choice:
        wanted = request.params.logprobs
        if wanted is None:
            return Choice(token)
        return Choice(token, -0.5, tuple((id_, -0.5 - place) for place, id_ in enumerate((token, 65, 240)[:wanted])))

    def statistics(self) -> FakeStatistics:
        return FakeStatistics(len(self.seen), 0, self._running, {"loaded_bytes": 7})

    def plan_lines(self) -> list[str]:
        return ["plan: nothing"]

    def describe(self) -> str:
        return "fake: no layers"

    def effects(self) -> list[Effect]:
        return [Effect("pcie_frac", False, "no card")]
