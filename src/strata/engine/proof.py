"""What ``strata verify`` and ``strata demo`` ask of the engine: arms and self-tests by name, results as plain rows.

Lives in ``engine`` so that the command line sees no model and no tensor. Two models are verified: the one asked for,
and a small computed one whose matrices are as wide as a released model's, since kernels that are right at one width
may be wrong at another.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from strata.checkpoint.pack_writer import Progress
from strata.config import Requested
from strata.engine import arms as placements
from strata.engine.devices import choose_card
from strata.engine.identity import NOT_FINITE, ArmResult, Script, Transcript
from strata.engine.models import OpenModel, open_model
from strata.engine.prompt_lengths import MANY, LengthPlan
from strata.engine.runtime import probe
from strata.engine.synthetic_model import open_wide
from strata.errors import ConfigError
from strata.kernels.cuda.prompt.frame import SHORT_ROWS

__all__ = ["Proof"]

WIDE = "wide: "  # before the names of the wide model's arms


def _check_lengths(lengths: Sequence[int], tokens: int, positions: int) -> None:
    """Raises ``ConfigError`` unless the longest leaves room for the decoded tokens and one window of drafts."""
    room = positions - tokens - max(Script(()).windows)
    if lengths and max(lengths) > room:
        raise ConfigError(
            f"a prompt of {max(lengths):,} and {tokens} tokens do not fit a context of {positions:,}",
            f"use --prompts of at most {room:,}",
        )


@dataclass(frozen=True)
class _Subject:
    """A model with what its arms play. ``usual``: names of the arms that run unless others are named; empty: all."""

    model: OpenModel
    requested: Requested
    plan: LengthPlan
    prefix: str = ""
    usual: tuple[str, ...] = ()


def _positions(model: OpenModel, requested: Requested) -> int:
    return model.config.max_positions if requested.max_context == "auto" else int(requested.max_context)


class Proof:
    """Open models and what is played on them. Results are iterators: a row is there as soon as its arm has ended."""

    def __init__(
        self, model: OpenModel, requested: Requested, plays: Script | LengthPlan, wide: _Subject | None = None
    ) -> None:
        """``plays``: a script is every arm's. ``wide``: the second model."""
        self._model, self._requested = model, requested
        first = _Subject(model, requested, LengthPlan.fixed(plays) if isinstance(plays, Script) else plays)
        self._subjects = [first] if wide is None else [first, wide]

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        requested: Requested,
        prompt_lengths: Sequence[int] | None,
        tokens: int | None,
        on_progress: Progress | None = None,
        *,
        wide: bool = False,
        full: bool = False,
    ) -> Iterator[Proof]:
        """``prompt_lengths`` None: those at the edges of kernels' blocks, as they fit the model's context; others are
        played by every arm. ``tokens`` after each prompt; None: a few after most. ``wide``: the wide model too.
        ``full``: every arm plays every length, on both. Raises ``ConfigError`` for lengths given that do not fit."""
        with contextlib.ExitStack() as owned:
            model = open_model(requested.model, on_progress=on_progress)
            owned.callback(model.close)
            on_card = choose_card(requested, probe(requested)) is not None

            def plan(of: OpenModel, asked: Requested) -> LengthPlan:
                positions = _positions(of, asked)
                found = LengthPlan.of_kernels(positions, tokens, on_card=on_card, whole=full)
                if prompt_lengths is None:
                    return found
                _check_lengths(prompt_lengths, tokens or MANY, positions)
                return LengthPlan.fixed(Script(tuple(prompt_lengths), tokens or MANY))

            second = None
            if wide:
                computed = owned.enter_context(open_wide())
                asked = dataclasses.replace(requested, model=None, max_context="auto")
                usual = () if full else placements.WIDE
                second = _Subject(computed, asked, plan(computed, asked), WIDE, usual)
            yield cls(model, requested, plan(model, requested), second)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Of all prompts that any arm of the model asked for plays."""
        subject = self._subjects[0]
        arms = self._every(subject)
        return Script.union(placements.script_of(subject.plan, arm) for arm in arms).prompt_lengths

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
        return [subject.prefix + arm.name for subject in self._subjects for arm in self._every(subject)]

    def _every(self, subject: _Subject) -> list[placements.Arm]:
        streams = not self.on_card or subject.plan.longest_usual > SHORT_ROWS
        return placements.all_arms(subject.model, on_card=self.on_card, streams=streams)

    def _chosen(self, subject: _Subject, wanted: Sequence[str]) -> list[placements.Arm]:
        """All usual arms, or the reference and those whose names hold one of ``wanted``."""
        every = self._every(subject)
        if wanted:
            chosen = [arm for arm in every if any(word in subject.prefix + arm.name for word in wanted)]
        else:
            chosen = [arm for arm in every if not subject.usual or arm.name in subject.usual]
        if chosen and chosen[0] is not every[0]:
            chosen.insert(0, every[0])
        return chosen

    def chosen(self, wanted: Sequence[str] = ()) -> list[str]:
        """Names of the arms that run, of each model the reference first."""
        return [one.prefix + arm.name for one in self._subjects for arm in self._chosen(one, wanted)]

    def arms(self, wanted: Sequence[str] = ()) -> Iterator[ArmResult]:
        """The results of ``chosen``."""
        for one in self._subjects:
            for result in placements.run_arms(one.model, one.requested, self._chosen(one, wanted), one.plan):
                yield dataclasses.replace(result, name=one.prefix + result.name)

    def count_self_tests(self) -> int:
        return len(placements.self_tests(self._model, on_card=self.on_card))

    @property
    def not_planted(self) -> tuple[str, ...]:
        """Self-tests that a card leaves out."""
        return placements.HOST_ALONE if self.on_card else ()

    def demo(self, prompt: str, on_progress: Callable[[str, str], None] | None = None) -> Iterator[ArmResult]:
        """The demo's placements over one prompt of text."""
        ids = self._model.text.tokenizer.encode(prompt)
        script = Script((len(ids),), self._subjects[0].plan.script.decode_tokens, prompts=(tuple(ids),))
        yield from placements.run_arms(
            self._model,
            self._requested,
            placements.demo_arms(self._model, len(ids), on_card=self.on_card),
            LengthPlan.fixed(script),
            on_progress,
        )

    def self_tests(self) -> Iterator[ArmResult]:
        """Each planted fault as a row; good when the fault was found and its arm named."""
        on_card = self.on_card
        plan = self._subjects[0].plan
        tests = placements.self_tests(self._model, on_card=on_card)
        first = placements.all_arms(self._model, on_card=on_card)[0]
        every = Script.union(placements.script_of(plan, test.arm) for test in tests)
        base = placements.run_arm(self._model, self._requested, first, every, reference=None)
        reference = base.transcript
        assert reference is not None, "the reference's error is raised"
        for test in tests:
            yield self._plant(test, placements.script_of(plan, test.arm), reference, every.longest)

    def _plant(self, test: placements.SelfTest, script: Script, reference: Transcript, longest: int) -> ArmResult:
        injection = test.injection()
        result = placements.run_arm(
            self._model, self._requested, test.arm, script, reference=reference, longest=longest, injection=injection
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
