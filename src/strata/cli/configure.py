"""From a command line to a ``Requested`` configuration: the flags made of the options, logging, ``--show-config``.

Lives in ``cli`` because only commands have flags. It knows options as data and none by meaning.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from strata.config import OPTIONS, Option, Requested
from strata.config_sources import Effect, format_configuration, resolve_here, unknown_variables
from strata.errors import ConfigError
from strata.logs import set_up_logging
from strata.option_values import format_value

__all__ = ["Configure", "flag_parameters"]

logger = logging.getLogger(__name__)

# Tells what became of each option: ``effects_of(requested) -> Iterable[Effect]``. Named, not imported: it plans the
# run, so it loads torch.
EFFECTS = ("strata.engine.effects", "effects_of")


def describe_flag(one: Option) -> str:
    default = "" if one.default is None else f" Default {format_value(one.default)}."
    return f"{one.help}{default}"


def flag_parameters(groups: set[str] | None = None) -> list[inspect.Parameter]:
    """One typer parameter for each option with a flag, of the groups named (None: all, and ``--show-config``).

    Values stay text: the option's own parser reads them, so an error is the same whatever the origin.
    """
    found = []
    for one in OPTIONS:
        if not one.flag or (groups is not None and one.group not in groups):
            continue
        kind: Any = bool | None if one.is_switch else str | None
        names = f"{one.flag}/--no-{one.flag[2:]}" if one.is_switch else one.flag
        declared = typer.Option(
            names,
            metavar=None if one.is_switch else one.metavar,
            help=describe_flag(one),
            show_default=False,
        )
        found.append(parameter(one.name, Annotated[kind, declared], None))
    if groups is None:
        declared = typer.Option("--show-config", help="Print every option with its value and origin, and stop.")
        found.append(parameter("show_config", Annotated[bool, declared], False))
    return found


def parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class Configure:
    """Called once by a command, with the model if the command line names one. See ``__call__``."""

    def __init__(self, flags: Mapping[str, object], show_config: bool = False) -> None:
        self._flags = dict(flags)
        self._show_config = show_config

    def __call__(
        self, model: str | None = None, *, effects: Callable[[Requested], Iterable[Effect]] | None = None
    ) -> Requested:
        """Resolves the configuration, starts logging, warns of variables that nothing reads.

        With ``--show-config`` prints the configuration and ends the command well; ``effects`` replaces the engine's
        account of what is in force. Raises ConfigError.
        """
        flags = dict(self._flags)
        if model is not None:
            if flags.get("model") is not None:
                raise ConfigError(f"the model is named twice: {model} and --model {flags['model']}", "leave one out")
            flags["model"] = model
        requested = resolve_here(command_line=flags)
        set_up_logging(requested.log_level, requested.log_file)
        for line in unknown_variables():
            logger.warning(line)
        if self._show_config:
            account = effects or getattr(import_module(EFFECTS[0]), EFFECTS[1])
            print(format_configuration(requested, account(requested)))
            raise typer.Exit
        return requested
