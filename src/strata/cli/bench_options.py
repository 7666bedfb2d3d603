"""Which of its own options each kind of ``strata bench`` takes, and how its command is written down.

Lives in ``cli`` because only the command line knows what was typed. An option that would do nothing is refused, and a
record holds every one that did something. It must not measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from strata.config import BY_NAME
from strata.errors import ConfigError
from strata.option_values import format_value

if TYPE_CHECKING:
    import typer

    from strata.config import Requested

__all__ = ["KINDS", "full_command", "refuse_idle_options"]

KINDS = ("kernels", "cache", "decode", "prompt", "ready", "checkpoint", "pack")
_SPEED = ("decode", "prompt")
_COMPUTED = ("decode", "ready", "checkpoint", "pack")
_KINDS_OF: Mapping[str, tuple[str, ...]] = {
    "name": ("cache", *_SPEED, "ready"),
    "gib": ("kernels",),
    "repeats": ("kernels",),
    "text": ("cache",),
    "tokens": ("cache",),
    "plot": ("cache",),
    "prompt": _SPEED,
    "measure": _SPEED,
    "decode": _SPEED,
    "runs": (*_SPEED, "ready"),
    "synthetic": _COMPUTED,
    "layers": _COMPUTED,
    "dense": _COMPUTED,
    "experts": _COMPUTED,
    "weight_seed": _COMPUTED,
    "arm": ("decode",),
    "learn": ("decode",),
    "profile": ("decode",),
    "to": ("checkpoint", "pack"),
    "out": ("kernels", "cache", *_SPEED, "ready"),
    "machine": ("kernels", "cache", *_SPEED, "ready"),
}
_SAMPLING = tuple(option for option in BY_NAME.values() if option.group == "sampling")
_OF_COMPUTED_MODELS = ("layers", "dense", "experts", "weight_seed", "arm", "learn", "profile")
_OF_OTHER_MODELS = ("name", "prompt", "measure")


def refuse_idle_options(context: typer.Context, what: str, synthetic: str | None, requested: Requested) -> None:
    """Raises ``ConfigError`` for the first option on the command line that means nothing for this benchmark."""
    for option in _SAMPLING:
        if requested.origin(option.name) == "command line":
            why = "a benchmark takes the likeliest token or forces the next one"
            raise ConfigError(f"{option.flag} means nothing for bench: {why}", "leave it out")
    for name, kinds in _KINDS_OF.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        said = "a model's name" if name == "name" else f"--{name.replace('_', '-')}"
        if what not in kinds:
            raise ConfigError(f"{said} means nothing for bench {what}", f"leave it out; it is for {', '.join(kinds)}")
        if synthetic is None and name in _OF_COMPUTED_MODELS:
            raise ConfigError(f"{said} is for computed models", "add --synthetic SHAPE, or leave it out")
        if synthetic is not None and name in _OF_OTHER_MODELS:
            raise ConfigError(f"{said} means nothing for --synthetic {synthetic}", "leave one of them out")


def full_command(command: str, requested: Requested) -> str:
    """``command`` and every option of the model that was not left as it is, as a user writes them. Paths are left out:
    a record is published."""
    before, after = [], []
    for name, option in BY_NAME.items():
        value = getattr(requested, name)
        if requested.origin(name) == "default" or name == "model" or isinstance(value, Path):
            continue
        if option.group in ("sampling", "log"):  # of which nothing is measured
            continue
        said = format_value(value)
        if not option.flag:
            before.append(f"{option.variable}={said}")
        elif value is not False:
            after.append(option.flag if option.is_switch else f"{option.flag} {said}")
    return " ".join([*before, command, *after])
