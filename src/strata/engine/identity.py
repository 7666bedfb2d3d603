"""Proof of promise 1: the same prompts through differently placed experts give the same bytes.

Lives in ``engine`` because it drives sessions; which placements exist and how a fault is planted is the arms'
business (``arms.py``). It hashes the logits of EVERY generated position, so one bit anywhere is seen.

An arm whose mechanism did not occur in its run is an error, never 'identical': a table of equal hashes in which
nothing was streamed proves nothing about streaming.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.errors import EngineError

if TYPE_CHECKING:
    import torch

    from strata.engine.session import Session

__all__ = ["NOT_FINITE", "ArmResult", "Script", "Transcript", "compare", "play", "prompt_ids"]

NOT_FINITE = "the logits are not finite"


@dataclass(frozen=True)
class Script:
    """What every arm reads and writes. ``windows`` gives the window sizes that share the decoded tokens equally."""

    prompt_lengths: tuple[int, ...] = (1, 7, 65, 513, 2048)
    decode_tokens: int = 64
    windows: tuple[int, ...] = (1, 4)
    prompts: tuple[tuple[int, ...], ...] = ()
    """The prompts' ids; empty: made up, by ``prompt_ids``."""

    def prompt(self, index: int, vocab_size: int, avoid: Sequence[int]) -> list[int]:
        if self.prompts:
            return list(self.prompts[index])
        return prompt_ids(self.prompt_lengths[index], vocab_size, avoid)


@dataclass
class Transcript:
    """What a script gave: per prompt the tokens and the sha256 of all logits, and what the windows did."""

    tokens: list[list[int]] = field(default_factory=list)
    logits_sha256: list[str] = field(default_factory=list)
    rounds: int = 0
    windows_of_several: int = 0
    drafts_accepted: int = 0
    drafts_rejected: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def sha256(self) -> str:
        """One digest of all logits of all prompts."""
        return hashlib.sha256("".join(self.logits_sha256).encode()).hexdigest()

    @property
    def tokens_sha256(self) -> str:
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()

    @property
    def decode_tokens_per_second(self) -> float:
        decoded = sum(len(tokens) for tokens in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class ArmResult:
    """One row of the table. ``missing`` names mechanisms that never occurred; ``difference`` says where bytes differ;
    ``found`` how a planted fault showed itself, which is the good end of a self-test."""

    name: str
    transcript: Transcript | None
    counters: Mapping[str, int]
    missing: tuple[str, ...] = ()
    difference: str = ""
    error: str = ""
    found: str = ""

    @property
    def good(self) -> bool:
        return self.transcript is not None and not (self.missing or self.difference or self.error)

    @property
    def verdict(self) -> str:
        if self.error:
            return f"error: {self.error}"
        if self.difference:
            return f"DIFFERENT: {self.difference}"
        if self.missing:
            return f"not exercised: {', '.join(self.missing)}"
        return self.found or "identical"


def prompt_ids(length: int, vocab_size: int, avoid: Sequence[int]) -> list[int]:
    """A fixed prompt of ``length`` ids spread over the vocabulary, none of ``avoid`` (the end tokens)."""
    ids: list[int] = []
    value = 12345 + length
    while len(ids) < length:
        value = (value * 1103515245 + 12345) % 2**31
        token = (value >> 8) % vocab_size
        if token not in avoid:
            ids.append(token)
    return ids


def play(
    new_session: Callable[[], Session],
    script: Script,
    vocab_size: int,
    end_ids: Sequence[int],
    *,
    reference: Transcript | None = None,
    windows: tuple[int, ...] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Transcript:
    """Plays the script and returns its transcript.

    ``reference`` supplies drafts for windows of several rows: the reference's own next tokens, every fifth one
    made wrong so that windows are partly rejected too. Without it all windows are of one row.
    """
    transcript = Transcript()
    began = time.perf_counter()
    for index, length in enumerate(script.prompt_lengths):
        if on_progress:
            on_progress(f"prompt of {length}")
        session = new_session()
        logits_V = session.read_prompt(script.prompt(index, vocab_size, end_ids))
        known = reference.tokens[index] if reference else []
        decode = _Decode(session, transcript, script.decode_tokens, known, vocab_size)
        decode.run(logits_V, (windows or script.windows) if reference else (1,))
    transcript.seconds = time.perf_counter() - began
    return transcript


class _Decode:
    """Greedy decoding of one prompt, hashing each position's logits once, whatever the window."""

    def __init__(
        self, session: Session, transcript: Transcript, count: int, known: Sequence[int], vocab_size: int
    ) -> None:
        self._session = session
        self._transcript = transcript
        self._count = count
        self._known = known
        self._vocab_size = vocab_size
        self._digest = hashlib.sha256()
        self._tokens: list[int] = []

    def run(self, logits_V: torch.Tensor, windows: tuple[int, ...]) -> None:
        began = time.perf_counter()
        self._take(logits_V)
        for part, window in enumerate(windows):
            until = self._count * (part + 1) // len(windows)
            while len(self._tokens) < until:
                self._round(min(window, self._count - len(self._tokens)))
        self._transcript.tokens.append(self._tokens)
        self._transcript.logits_sha256.append(self._digest.hexdigest())
        self._transcript.decode_seconds += time.perf_counter() - began

    def _round(self, window: int) -> None:
        written = len(self._tokens)
        drafts = list(self._known[written : written + window - 1])
        for offset, _ in enumerate(drafts):
            if (written + offset) % 5 == 0:
                drafts[offset] = (drafts[offset] + 1) % self._vocab_size
        rows = [self._tokens[-1], *drafts]
        logits_TV = self._session.round(rows)
        accepted = 1
        self._take(logits_TV[0])
        while accepted < len(rows) and rows[accepted] == self._tokens[-1]:
            self._take(logits_TV[accepted])
            accepted += 1
        self._session.commit(accepted, decoded=True)
        self._transcript.rounds += 1
        self._transcript.windows_of_several += len(rows) > 1
        self._transcript.drafts_accepted += accepted - 1
        self._transcript.drafts_rejected += len(rows) - accepted

    def _take(self, logits_V: torch.Tensor) -> None:
        if not bool(logits_V.isfinite().all()):
            raise EngineError(NOT_FINITE, "the checkpoint or a copy of it is damaged")
        self._digest.update(logits_V.contiguous().numpy().tobytes())
        self._tokens.append(int(logits_V.numpy().argmax()))


def compare(reference: Transcript, other: Transcript, script: Script) -> str:
    """Where ``other`` differs from ``reference``, as one phrase, or '' when all bytes are the same."""
    for length, a, b, x, y in zip(
        script.prompt_lengths,
        reference.logits_sha256,
        other.logits_sha256,
        reference.tokens,
        other.tokens,
        strict=True,
    ):
        if a != b:
            first = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), None)
            where = f"tokens from token {first + 1} on" if first is not None else "logits only, tokens equal"
            return f"prompt of {length}: {where}"
    return ""
