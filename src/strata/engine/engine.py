"""The engine as its users see it: open a model, ask for text, read statistics. No tensor crosses this boundary.

Lives at the top of ``engine``; server, command line and Python programs use this and nothing below it. One engine
holds one model and answers one request at a time: others wait their turn in the order they came.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from strata.checkpoint.pack_writer import Progress
from strata.config import Requested
from strata.config_sources import Effect, resolve_here
from strata.engine.cancellation import Cancellation, Cancelled
from strata.engine.effects import plan_effects
from strata.engine.generation import Piece, answer
from strata.engine.models import OpenModel, open_model
from strata.engine.runtime import Runtime, RuntimeStatistics
from strata.engine.sampling_params import SamplingParams
from strata.engine.session import Session
from strata.engine.turns import Turns
from strata.errors import EngineError, RequestError
from strata.text.pipeline import ChatPrompt, TextPipeline
from strata.text.stream import TextStream
from strata.words import count_of

__all__ = ["Engine", "EngineStatistics", "Request", "Usage"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A prompt as ids, how its answer is sampled, and the stream that turns tokens into text."""

    ids: tuple[int, ...]
    params: SamplingParams
    stream: TextStream


@dataclass(frozen=True)
class Usage:
    """Tokens and seconds of one finished request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_seconds: float
    decode_seconds: float
    rounds: int


@dataclass(frozen=True)
class EngineStatistics:
    """Counters since the engine was loaded; ``waiting`` and ``running`` are now."""

    requests: int
    cancelled: int
    failed: int
    waiting: int
    running: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prompt_seconds: float
    decode_seconds: float
    rounds: int
    runtime: RuntimeStatistics


class Engine:
    """See the module's page. Safe to call from any thread; close it once."""

    def __init__(self, model: OpenModel, requested: Requested, runtime: Runtime) -> None:
        self.requested = requested
        self.model = model
        self.text: TextPipeline = model.text
        self._runtime = runtime
        self._session: Session | None = None
        self._turn = Turns()
        self._computing = threading.Lock()
        self._closed = False
        self._active: Cancellation | None = None
        self._totals: dict[str, float] = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "completion_tokens", "prompt_seconds", "decode_seconds", "rounds"), 0
        )
        self._requests = self._cancelled = self._failed = 0
        self.last_usage: Usage | None = None

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        requested: Requested | None = None,
        on_progress: Progress | None = None,
        **options: object,
    ) -> Engine:
        """Opens a pack, a checkpoint folder (packed once into STRATA_HOME), a name there, or the built-in model.

        ``options`` are the fields of ``Requested`` (``expert_cache=64, vram_gib=12``); environment and config files
        count as on the command line. ``on_progress(phase, done, total)`` is told of bytes. Raises ``StrataError``.
        """
        if requested is None:
            if model is not None:
                options["model"] = os.fspath(model)
            requested = resolve_here(arguments=options)
        opened = open_model(requested.model, on_progress=on_progress)
        try:
            return cls(opened, requested, Runtime.open(opened, requested, on_progress=on_progress))
        except BaseException:
            opened.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees everything; a running request is cancelled and its current step waited for. Harmless when repeated."""
        self._turn.close()
        if self._active:
            self._active.cancel()
        with self._computing:
            if not self._closed:
                self._closed = True
                self._runtime.close()
                self.model.close()

    # Asking ------------------------------------------------------------------------------------------------------

    def plain_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, parse_special: bool = True
    ) -> Request:
        """A completion of text or ids as they stand. Markers of the vocabulary in a text are tokens, as filling in the
        middle needs, unless ``parse_special`` is false (decision 0121). Raises ``RequestError``."""
        if isinstance(prompt, str):
            self._check_length(prompt)
            ids = self.text.tokenizer.encode(prompt, markers=parse_special)
        else:
            ids = list(prompt)
        vocabulary = self._runtime.vocabulary
        if not ids:
            raise RequestError("the prompt is empty", "give at least one token of text")
        for token in ids:
            if not 0 <= token < vocabulary:
                raise RequestError(f"token id {token} is not in the vocabulary of {vocabulary:,} ids")
        stream = self.text.plain_stream(
            stop=params.stop, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
        )
        return self._checked(Request(tuple(ids), params, stream))

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        continue_last: bool = False,
    ) -> Request:
        """A conversation through the model's chat template. Raises ``RequestError``."""
        prompt: ChatPrompt = self.text.chat(
            messages, tools=tools, options=options, continue_last=continue_last, check=self._check_length
        )
        stream = self.text.chat_stream(
            prompt, stop=params.stop, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
        )
        return self._checked(Request(prompt.ids, params, stream))

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit by its length alone, before it is encoded, which can take seconds."""
        fewest = self.text.tokenizer.fewest_tokens(text)
        if fewest > self._runtime.max_context:
            raise self._too_long(f"at least {fewest:,}")

    def _too_long(self, count: str) -> RequestError:
        return RequestError(
            f"the prompt has {count} tokens, the context holds {self._runtime.max_context:,}",
            " or ".join(["shorten the prompt", *self._more_context()]),
            code="context_length_exceeded",
        )

    def _checked(self, request: Request) -> Request:
        if len(request.ids) > self._runtime.max_context:
            raise self._too_long(f"{len(request.ids):,}")
        strays = [token for token in request.params.logit_bias if token >= self._runtime.vocabulary]
        if strays:
            raise RequestError(
                f"logit_bias names token {strays[0]}, the vocabulary has {self._runtime.vocabulary:,} ids"
            )
        return request

    def _more_context(self) -> list[str]:
        """--max-context as a way out, where the model goes further than what is in force."""
        most = self.model.config.max_positions
        return [f"raise --max-context, the model allows {most:,}"] if most > self._runtime.max_context else []

    def _tell_full_context(self, request: Request, count: int) -> None:
        """One line for an answer that ended because no position was left, not because of what was asked."""
        limit = self._runtime.max_context
        room, asked = limit - len(request.ids) + 1, request.params.max_tokens
        if count >= room and (asked is None or asked > room):
            line = f"the context of {count_of(limit, 'position')} is full"
            logger.info("; ".join([line, *self._more_context()]))

    def submit(
        self,
        request: Request,
        *,
        cancellation: Cancellation | None = None,
        on_prompt: Callable[[int, int], None] | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> Iterator[Piece]:
        """Pieces of the answer; waits its turn first. Closing the iterator cancels. At the end ``last_usage`` is set
        and ``on_usage`` called with it, before the next request has its turn.

        The session keeps what was read and said, so a prompt that goes on from there is not read again.
        """
        cancellation = cancellation or Cancellation()
        with self._turn.take(cancellation) as taken:
            if not taken:
                self._cancelled += 1
                yield Piece((), None, "cancelled")
                return
            yield from self._run(request, cancellation, on_prompt, on_usage)

    def _run(
        self,
        request: Request,
        cancellation: Cancellation,
        on_prompt: Callable[[int, int], None] | None,
        on_usage: Callable[[Usage], None] | None,
    ) -> Iterator[Piece]:
        self._requests += 1
        session = self._session = self._session or Session(self._runtime)
        kept = session.keep_prefix_of(request.ids)
        before = session.statistics()
        count, ended = 0, False
        self._active = cancellation
        pieces = self._pieces(session, request, kept, cancellation, on_prompt)
        try:
            while (piece := self._step(pieces)) is not None:
                count += piece.choice is not None
                ended = piece.finish is not None and piece.finish != "cancelled"
                if piece.finish == "length":
                    self._tell_full_context(request, count)
                yield piece
        except GeneratorExit:
            raise
        except BaseException:
            self._failed += 1
            self._session = None
            ended = True
            raise
        finally:
            self._active = None
            self._cancelled += not ended
            usage = self._account(session, before, len(request.ids), kept, count)
            if on_usage:
                on_usage(usage)

    def _step(self, pieces: Iterator[Piece]) -> Piece | None:
        """The next piece; the memory that it computes in cannot be freed meanwhile, only between two steps."""
        with self._computing:
            if self._closed:
                raise EngineError("the engine was closed in the middle of an answer", "load it again")
            return next(pieces, None)

    def _pieces(
        self,
        session: Session,
        request: Request,
        kept: int,
        cancellation: Cancellation,
        on_prompt: Callable[[int, int], None] | None,
    ) -> Iterator[Piece]:
        try:
            logits_V = session.read_prompt(request.ids[kept:], cancellation=cancellation, on_progress=on_prompt)
        except Cancelled:
            yield Piece(tuple(request.stream.close()), None, "cancelled")
            return
        yield from answer(
            session,
            logits_V,
            request.stream,
            request.params,
            prompt=request.ids,
            end_ids=self.text.end_ids,
            room=self._runtime.max_context - len(request.ids) + 1,
            cancellation=cancellation,
        )

    def _account(self, session: Session, before: Any, prompt: int, kept: int, count: int) -> Usage:
        after = session.statistics()
        usage = Usage(
            prompt,
            kept,
            count,
            after.prompt_seconds - before.prompt_seconds,
            after.decode_seconds - before.decode_seconds,
            after.rounds - before.rounds,
        )
        for name in self._totals:
            self._totals[name] += getattr(usage, name)
        self.last_usage = usage
        return usage

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        cancellation: Cancellation | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Pieces of text: of a completion for a string or ids, of a chat's answer for a list of messages.

        ``sampling`` are fields of ``SamplingParams``; what is not given comes from the configuration.
        """
        params = self.sampling(sampling)
        if isinstance(prompt, str):
            request = self.plain_request(prompt, params)
        elif prompt and isinstance(prompt[0], Mapping):
            request = self.chat_request(cast("Sequence[Mapping[str, Any]]", prompt), params)
        else:
            request = self.plain_request(cast("Sequence[int]", prompt), params)
        for piece in self.submit(request, cancellation=cancellation):
            if piece.text:
                yield piece.text

    def sampling(self, given: Mapping[str, Any] | None = None) -> SamplingParams:
        """``SamplingParams`` from what a request gives, over the sampling options that the user set, over what the
        checkpoint's generation_config.json recommends, over the options' defaults."""
        wanted = self.requested
        defaults: dict[str, Any] = {
            "temperature": wanted.temperature,
            "top_k": wanted.top_k,
            "top_p": wanted.top_p,
            "min_p": wanted.min_p,
            "repetition_penalty": wanted.repetition_penalty,
            "presence_penalty": wanted.presence_penalty,
            "frequency_penalty": wanted.frequency_penalty,
            "seed": wanted.seed,
            "max_tokens": wanted.max_tokens,
        }
        for name, value in self.text.sampling_defaults.items():
            if name in defaults and wanted.origin(name) == "default":
                defaults[name] = value
        return SamplingParams.from_request(dict(given or {}), defaults)

    # Being looked at ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's name for clients: that of its folder."""
        return self.model.reader.folder.name

    def effects(self) -> list[Effect]:
        """What became of the options that a plan can overrule."""
        planned = plan_effects(self._runtime.plan, self.requested)
        mailbox = self._runtime.mailbox_effect()
        return planned if mailbox is None else [*(one for one in planned if one.option != mailbox.option), mailbox]

    @property
    def max_context(self) -> int:
        return self._runtime.max_context

    def plan_lines(self) -> list[str]:
        """The plan that is in force, for people."""
        return self._runtime.plan.lines()

    def describe(self) -> str:
        """One line: model, where it runs, what it holds."""
        return self._runtime.describe()

    def statistics(self) -> EngineStatistics:
        totals = self._totals
        return EngineStatistics(
            requests=self._requests,
            cancelled=self._cancelled,
            failed=self._failed,
            waiting=self._turn.waiting,
            running=int(self._turn.running),
            prompt_tokens=int(totals["prompt_tokens"]),
            cached_tokens=int(totals["cached_tokens"]),
            completion_tokens=int(totals["completion_tokens"]),
            prompt_seconds=totals["prompt_seconds"],
            decode_seconds=totals["decode_seconds"],
            rounds=int(totals["rounds"]),
            runtime=self._runtime.statistics(),
        )

    def measure(self, ids: Sequence[int], tokens: int, *, given: Sequence[int] | None = None) -> dict[str, float]:
        """Milliseconds of a fresh prompt and of ``tokens`` greedy tokens after it, end tokens ignored.

        ``given`` tokens take the place of greedy ones: a random model repeats itself, and so do its picks.
        """
        session = Session(self._runtime)
        began = time.perf_counter()
        token = int(session.read_prompt(ids).argmax())
        read = time.perf_counter()
        for at in range(tokens):
            token = session.greedy_round([token if given is None else given[at]])[0]
            session.commit(1, decoded=True)
        done = time.perf_counter()
        return {
            "prompt_n": len(ids),
            "prompt_ms": 1e3 * (read - began),
            "decode_n": tokens,
            "decode_ms": 1e3 * (done - read),
        }
