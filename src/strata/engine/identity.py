"""Proof of promise 1: the same prompts through differently placed experts give the same bytes.

Lives in ``engine`` because it drives sessions; which placements exist and how a fault is planted is the arms'
business (``arms.py``), which prompts are read ``prompt_lengths.py``'s. It hashes the logits of EVERY generated
position, so one bit anywhere is seen, and lets the engine answer by itself once, which finds its tokens another way.

An arm whose mechanism did not occur in its run is an error, never 'identical': a table of equal hashes in which
nothing was streamed proves nothing about streaming.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.errors import EngineError

if TYPE_CHECKING:
    import torch

    from strata.engine.session import Session
    from strata.experts.injection import Witness
    from strata.text.tokenizer import Tokenizer

__all__ = ["NOT_FINITE", "ArmResult", "Script", "Transcript", "compare", "play", "prompt_ids"]

NOT_FINITE = "the logits are not finite"
WINDOWS = (1, 4, 8)  # rows of decode windows: one, some, and as many as a round on a card has


@dataclass(frozen=True)
class Script:
    """What an arm reads and writes. ``windows`` gives the window sizes that share the decoded tokens equally."""

    prompt_lengths: tuple[int, ...]
    decode_tokens: int = 64
    windows: tuple[int, ...] = WINDOWS
    prompts: tuple[tuple[int, ...], ...] = ()
    """The prompts' ids; empty: made up, by ``prompt_ids``."""
    few_tokens: int | None = None
    """Tokens decoded after the prompts that ``long_after`` does not name; None: as many as after those."""
    long_after: tuple[int, ...] = ()

    def prompt(self, index: int, vocab_size: int, avoid: Sequence[int]) -> list[int]:
        if self.prompts:
            return list(self.prompts[index])
        return prompt_ids(self.prompt_lengths[index], vocab_size, avoid)

    def tokens_after(self, length: int) -> int:
        """Tokens decoded after a prompt of ``length``."""
        few = self.few_tokens is not None and length not in self.long_after
        return self.few_tokens if few and self.few_tokens is not None else self.decode_tokens

    @property
    def longest(self) -> int:
        """Positions that the longest sequence takes."""
        return max(length + self.tokens_after(length) for length in self.prompt_lengths)

    @classmethod
    def union(cls, scripts: Iterable[Script]) -> Script:
        """What all of these play, for who is compared with each of them: they differ in their lengths alone."""
        every = list(scripts)
        lengths = sorted({length for script in every for length in script.prompt_lengths})
        return every[0] if every[0].prompts else dataclasses.replace(every[0], prompt_lengths=tuple(lengths))


@dataclass
class Transcript:
    """What a script gave: per prompt its length, the tokens and the sha256 of all logits, and what the windows did.

    ``answered``: how the tokens of the engine's own greedy answer differ from these, or ''."""

    lengths: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    logits_sha256: list[str] = field(default_factory=list)
    answered: str = ""
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

    def known(self, length: int) -> list[int]:
        """The tokens after the prompt of ``length``."""
        return self.tokens[self.lengths.index(length)]

    @property
    def decode_tokens_per_second(self) -> float:
        decoded = sum(len(tokens) for tokens in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class ArmResult:
    """One row of the table. ``missing`` names mechanisms that never occurred; ``difference`` says where bytes differ;
    ``found`` how a planted fault showed itself, which is the good end of a self-test; ``mode`` is the RAM mode and
    ``seen`` what experts did in it."""

    name: str
    transcript: Transcript | None
    counters: Mapping[str, int]
    missing: tuple[str, ...] = ()
    difference: str = ""
    error: str = ""
    found: str = ""
    mode: str = ""
    seen: Witness | None = None

    @property
    def met(self) -> dict[str, int]:
        """Calls of a layer by the tiers that met in it; of rounds on a card none are seen."""
        met: Counter[str] = Counter()
        for (tiers, _), count in (self.seen.calls if self.seen else {}).items():
            met["+".join(tier.name for tier in tiers)] += count
        return dict(met)

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
    reading: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Transcript:
    """Plays the script and returns its transcript.

    ``reference`` supplies drafts for windows of several rows: the reference's own next tokens, every fifth one
    made wrong so that windows are partly rejected too. Without it all windows are of one row. ``reading``: prompts are
    read in groups of so many rows, over and over, and not in chunks. ``tokenizer``: the first prompt's answer is also
    made as a user's is, by the engine's own greedy way.
    """
    transcript = Transcript()
    began = time.perf_counter()
    for index, length in enumerate(script.prompt_lengths):
        if on_progress:
            on_progress(f"prompt of {length}")
        session = new_session()
        ids = script.prompt(index, vocab_size, end_ids)
        logits_V = _read(session, ids, reading)
        known = reference.known(length) if reference else []
        decode = _Decode(session, transcript, script.tokens_after(length), known, vocab_size)
        decode.run(logits_V, (windows or script.windows) if reference else (1,))
        transcript.lengths.append(length)
        if tokenizer is not None and not index:
            answered = _answer(new_session(), ids, tokenizer, len(transcript.tokens[0]))
            transcript.answered = _first_other(transcript.tokens[0], answered)
    transcript.seconds = time.perf_counter() - began
    return transcript


def _read(session: Session, ids: Sequence[int], reading: tuple[int, ...]) -> torch.Tensor:
    """Logits of the last row. Groups of ``reading`` are taken from the prompt's end, so that it ends with the first."""
    if not reading:
        return session.read_prompt(ids)
    ends = [len(ids)]
    for rows in itertools.cycle(reading):
        if ends[-1] <= rows:
            break
        ends.append(ends[-1] - rows)
    starts = [0, *reversed(ends[1:])]
    for first, stop in zip(starts, reversed(ends), strict=True):
        logits_V = session.read_prompt(ids[first:stop])
    return logits_V


def _answer(session: Session, ids: Sequence[int], tokenizer: Tokenizer, count: int) -> Iterator[int]:
    """The tokens of a greedy answer, as every request's are made."""
    from strata.engine.generation import answer
    from strata.engine.sampling_params import SamplingParams
    from strata.text.stream import TextStream

    params = SamplingParams(temperature=0.0, max_tokens=count)
    pieces = answer(
        session, session.read_prompt(ids), TextStream(tokenizer), params, prompt=ids, end_ids=(), room=count
    )
    return (piece.choice.token for piece in pieces if piece.choice is not None)


def _first_other(tokens: Sequence[int], answered: Iterable[int]) -> str:
    pairs = enumerate(itertools.zip_longest(tokens, answered), 1)
    return next((f"greedy answers differ from token {number} on" for number, (a, b) in pairs if a != b), "")


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


def compare(reference: Transcript, other: Transcript) -> str:
    """Where ``other`` differs from ``reference`` in the prompts that it played, as one phrase, or '' when all bytes are
    the same."""
    for length, digest, tokens in zip(other.lengths, other.logits_sha256, other.tokens, strict=True):
        at = reference.lengths.index(length)
        if digest != reference.logits_sha256[at]:
            pairs = zip(reference.tokens[at], tokens, strict=False)
            first = next((i for i, (p, q) in enumerate(pairs) if p != q), None)
            where = f"tokens from token {first + 1} on" if first is not None else "logits only, tokens equal"
            return f"prompt of {length}: {where}"
    return other.answered
