"""Tells a command's optional MODEL from its PROMPT.

Lives in ``cli`` because only a command line leaves this open. Two words are model and prompt; one word is a model
only if it is an existing path or a name in STRATA_HOME, and nothing else was meant to be the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.errors import ConfigError
from strata.paths import expanded, find_home

__all__ = ["is_model", "split_model_and_prompt"]


def is_model(word: str) -> bool:
    """Whether ``word`` is an existing folder or file, or the name of a model in STRATA_HOME."""
    if not word:
        return False
    try:
        if expanded(word).exists():
            return True
        return "/" not in word and (find_home().models / word).exists()
    except OSError:  # a prompt too long to be a name
        return False


def split_model_and_prompt(words: Sequence[str]) -> tuple[str | None, str | None]:
    """(model, prompt). One word that names a model is the model; several words without a model are a mistake."""
    if not words:
        return None, None
    if len(words) == 1:
        return (words[0], None) if is_model(words[0]) else (None, words[0])
    if len(words) == 2:
        return words[0], words[1]
    raise ConfigError(f"{len(words)} words where a model and a prompt are expected", "put the prompt in quotes")
