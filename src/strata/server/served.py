"""What the server asks of an engine, and nothing more.

Lives in ``server`` as the one list of what crosses that boundary: text, numbers and events, no tensor. ``Engine``
fits it; tests fit it with an engine that says what they want, when they want it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.config_sources import Effect
    from strata.engine.cancellation import Cancellation
    from strata.engine.engine import Request, Usage
    from strata.engine.generation import Piece
    from strata.engine.sampling_params import SamplingParams
    from strata.text.pipeline import TextPipeline

__all__ = ["ServedEngine"]


class ServedEngine(Protocol):
    """See ``engine.Engine`` for what each member says. Called from any thread."""

    requested: Requested
    text: TextPipeline

    @property
    def name(self) -> str: ...

    @property
    def max_context(self) -> int: ...

    def sampling(self, given: Mapping[str, Any] | None = None) -> SamplingParams: ...

    def plain_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, parse_special: bool = True
    ) -> Request: ...

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        continue_last: bool = False,
    ) -> Request: ...

    def submit(
        self,
        request: Request,
        *,
        cancellation: Cancellation | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> Iterator[Piece]: ...

    def statistics(self) -> object: ...

    def plan_lines(self) -> Sequence[str]: ...

    def describe(self) -> str: ...

    def effects(self) -> Iterable[Effect]: ...
