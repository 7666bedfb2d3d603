"""What ``strata verify`` and ``strata demo`` ask of the engine: arms and self-tests by name, results as plain rows.

Lives in ``engine`` so that the command line sees no model and no tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from strata.checkpoint.pack_writer import Progress
from strata.config import Requested
from strata.engine import arms as placements
from strata.engine.devices import choose_card
from strata.engine.identity import NOT_FINITE, ArmResult, Script, Transcript
from strata.engine.models import OpenModel, open_model
from strata.engine.runtime import probe
from strata.errors import ConfigError

__all__ = ["Proof"]


USUAL_LENGTHS = (1, 7, 65, 513, 2048)  # no decode window any more; one past a chunk; chunks that end together


def _fitting(lengths: Sequence[int] | None, tokens: int, positions: int) -> tuple[int, ...]:
    """Lengths that leave room for the decoded tokens and one window of drafts."""
    room = positions - tokens - max(Script().windows)
    if room < 1:
        raise ConfigError(f"{tokens} tokens do not fit a context of {positions:,}", "give fewer --tokens")
    if lengths is None:
        return tuple(dict.fromkeys(min(length, room) for length in USUAL_LENGTHS))
    if lengths and max(lengths) > room:
        raise ConfigError(
            f"a prompt of {max(lengths):,} and {tokens} tokens do not fit a context of {positions:,}",
            f"use --prompts of at most {room:,}",
        )
    return tuple(lengths)


class Proof:
    """An open model and a script. The results are iterators: a row is there as soon as its arm has ended."""

    def __init__(self, model: OpenModel, requested: Requested, script: Script) -> None:
        self._model, self._requested, self._script = model, requested, script

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        requested: Requested,
        prompt_lengths: Sequence[int] | None,
        tokens: int,
        on_progress: Progress | None = None,
    ) -> Iterator[Proof]:
        """``prompt_lengths`` None: the usual ones, cut to the model's context. Raises ``ConfigError`` for lengths given
        that do not fit."""
        model = open_model(requested.model, on_progress=on_progress)
        try:
            longest = model.config.max_positions if requested.max_context == "auto" else int(requested.max_context)
            yield cls(model, requested, Script(_fitting(prompt_lengths, tokens, longest), tokens))
        finally:
            model.close()

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return self._script.prompt_lengths

    @property
    def on_card(self) -> bool:
        """Whether rounds run on a card."""
        return choose_card(self._requested, probe(self._requested)) is not None

    @property
    def overruled(self) -> list[str]:
        """Options that were set and that every arm sets by itself."""
        return placements.overruled(self._requested)

    @property
    def num_demo(self) -> int:
        return len(placements.DEMO)

    @property
    def arm_names(self) -> list[str]:
        return [arm.name for arm in placements.all_arms(self._model, on_card=self.on_card)]

    def chosen(self, wanted: Sequence[str] = ()) -> list[placements.Arm]:
        """All arms, or the reference and those whose names hold one of ``wanted``."""
        every = placements.all_arms(self._model, on_card=self.on_card)
        chosen = [arm for arm in every if not wanted or any(word in arm.name for word in wanted)]
        if chosen and chosen[0] is not every[0]:
            chosen.insert(0, every[0])
        return chosen

    def arms(self, wanted: Sequence[str] = ()) -> Iterator[ArmResult]:
        """The results of ``chosen``."""
        yield from placements.run_arms(self._model, self._requested, self.chosen(wanted), self._script)

    def count_self_tests(self) -> int:
        return len(placements.self_tests(self._model, on_card=self.on_card))

    @property
    def not_planted(self) -> tuple[str, ...]:
        """Self-tests that a card leaves out."""
        return placements.HOST_ALONE if self.on_card else ()

    def demo(self, prompt: str, on_progress: Callable[[str, str], None] | None = None) -> Iterator[ArmResult]:
        """The demo's placements over one prompt of text."""
        ids = self._model.text.tokenizer.encode(prompt)
        script = Script((len(ids),), self._script.decode_tokens, prompts=(tuple(ids),))
        yield from placements.run_arms(
            self._model,
            self._requested,
            placements.demo_arms(self._model, len(ids), on_card=self.on_card),
            script,
            on_progress,
        )

    def self_tests(self) -> Iterator[ArmResult]:
        """Each planted fault as a row; good when the fault was found and its arm named."""
        on_card = self.on_card
        first = placements.all_arms(self._model, on_card=on_card)[0]
        base = placements.run_arm(self._model, self._requested, first, self._script, reference=None)
        reference = base.transcript
        assert reference is not None, "the reference's error is raised"
        for test in placements.self_tests(self._model, on_card=on_card):
            yield self._plant(test, reference)

    def _plant(self, test: placements.SelfTest, reference: Transcript) -> ArmResult:
        injection = test.injection()
        result = placements.run_arm(
            self._model, self._requested, test.arm, self._script, reference=reference, injection=injection
        )
        name = f"{test.name}"
        if injection.happened and result.error.startswith(NOT_FINITE):
            found = f"found: arm '{test.arm.name}' ended, {NOT_FINITE}"
            return ArmResult(name, Transcript(), result.counters, found=found)
        if result.error:
            return ArmResult(name, None, result.counters, error=result.error)
        if not injection.happened:
            return ArmResult(name, result.transcript, result.counters, ("the fault itself",))
        if not result.difference:
            missed = f"arm '{test.arm.name}' was called identical although {injection.happened[0]}"
            return ArmResult(name, result.transcript, result.counters, difference=missed)
        found = f"found: arm '{test.arm.name}' differs, {result.difference}"
        return ArmResult(name, result.transcript, result.counters, found=found)
