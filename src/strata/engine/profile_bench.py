"""``strata bench decode --synthetic SHAPE --profile FOLDER``: where its rounds and a prompt spend time.

Lives in ``engine`` beside ``synthetic_bench``, whose models it opens. What is timed is ``round_profile``'s; a profiled
run measures no speed. It must not know a model's name or where experts lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.engine.round_profile import profile_prompt, profile_rounds
from strata.engine.synthetic_bench import WARM_ROUNDS, K, Report, SyntheticCase, open_learned
from strata.engine.synthetic_text import token_list
from strata.engine.timeline import Timeline

if TYPE_CHECKING:
    from strata.config import Requested

__all__ = ["SyntheticProfile", "profile_synthetic"]

PROMPT_TOKENS = 512


@dataclass(frozen=True)
class SyntheticProfile:
    """``decode``: ``rounds`` rounds of one row; ``prompt``: one of ``prompt_tokens`` tokens."""

    decode: Timeline
    rounds: int
    prompt: Timeline
    prompt_tokens: int


def profile_synthetic(
    case: SyntheticCase, requested: Requested, rounds: int, report: Report = print
) -> SyntheticProfile:
    """The skewed arm. A prompt before the one that is profiled, and rounds before the rounds, warm what they use."""
    with open_learned(case, "skewed", requested, report) as (_, runtime):
        decode, prompt = Timeline(), Timeline()
        ids = token_list(runtime.vocabulary, rounds + WARM_ROUNDS, "measured")
        context = min(K, runtime.max_context - len(ids))
        profile_rounds(runtime, ids[:WARM_ROUNDS], context, Timeline())
        profile_rounds(runtime, ids[WARM_ROUNDS:], context, decode)
        count = min(PROMPT_TOKENS, runtime.max_context)
        text = token_list(runtime.vocabulary, 2 * count, "measured")
        profile_prompt(runtime, text[:count], Timeline())
        profile_prompt(runtime, text[count:], prompt)
        return SyntheticProfile(decode, rounds, prompt, count)
