"""Where the values of options come from, and how a configuration is printed.

Lives on top, beside ``config.py``, which declares the options; this file reads them from the command line or Python,
the environment and the two files, checks them, and remembers the origin of each. It must not know what an option
means, beyond which of them contradict each other.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from strata.config import BY_NAME, ENVIRONMENT_PREFIX, OPTIONS, OTHER_VARIABLES, Option, Origin, Requested
from strata.errors import ConfigError
from strata.files import read_regular
from strata.option_values import format_value
from strata.paths import find_home, refuse_foreign_bytes

__all__ = ["Effect", "format_configuration", "resolve", "resolve_here", "unknown_variables"]


def suggest(word: str, among: Iterable[str]) -> str:
    """'; did you mean NAME?' for the name that is spelt most like ``word``, else for one that shares a word with it."""
    names = sorted(among)
    spelt = word if word.isupper() else word.lower().replace("-", "_")
    close = difflib.get_close_matches(spelt, names, n=1, cutoff=0.7 if word.isupper() else 0.6)
    own = set(spelt.split("_")) - {ENVIRONMENT_PREFIX.rstrip("_")}
    close = close or [name for name in names if own & set(name.split("_"))]
    return f"; did you mean {close[0]}?" if close else ""


def parse_option(one: Option, value: object, where: str) -> object:
    """Parses text, or checks a typed value by way of its text. Raises ConfigError naming option, value and origin."""
    text = value if isinstance(value, str) else text_of(value)
    refuse_foreign_bytes(f"{one.spelling} ({where})", text)
    try:
        parsed = one.parse(text)
        if isinstance(value, bool) and not isinstance(parsed, bool):
            raise ValueError("a text")
    except ValueError as error:
        raise ConfigError(f"{one.spelling}: {text!r} ({where}) cannot be taken", f"give {error}") from None
    return parsed


def text_of(value: object) -> str:
    """As a user would write it. True and False are words: to Python they are also 1 and 0, which numbers must not be
    given as."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return format_value(value)
    except ValueError:  # Python does not write it out
        return "a number of thousands of digits"


def read_toml(path: Path) -> dict[str, object]:
    """Key -> value of a configuration file. ConfigError for text that is no TOML and unknown keys."""
    try:
        table = tomllib.loads(read_regular(path).decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", "save it as UTF-8, or remove it") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", "make it a file that this user can read, or remove it"
        ) from None
    except ValueError as error:  # of TOML, or of a number of thousands of digits
        raise ConfigError(f"{path} cannot be read as TOML: {error}", "mend the file or remove it") from None
    for key, value in table.items():
        if key not in BY_NAME:
            raise ConfigError(
                f"{path}: {key!r} is no option{suggest(key, BY_NAME)}", "docs/reference/configuration.md lists them all"
            )
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{path}: {key} holds a {type(value).__name__}", "give a text, a number, true or false")
    return table


def resolve(
    *,
    command_line: Mapping[str, object] | None = None,
    arguments: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    model_file: Path | None = None,
    home_file: Path | None = None,
    base: Requested | None = None,
) -> Requested:
    """Takes each option from the first origin that sets it. ``None`` values count as not given.

    ``command_line`` and ``environment`` hold texts; ``arguments`` (from Python) texts or typed values. Files that do
    not exist are passed over. ``base`` supplies what no origin sets, with its origins. Raises ConfigError.
    """
    layers: list[tuple[Origin, str, Mapping[str, object]]] = [
        ("command line", "from the command line", command_line or {}),
        ("argument", "from Python", arguments or {}),
    ]
    if environment is not None:
        found = {one.name: environment[one.variable] for one in OPTIONS if one.variable in environment}
        layers.append(("environment", "from the environment", found))
    files: tuple[tuple[Origin, Path | None], ...] = (("model file", model_file), ("home file", home_file))
    for origin, path in files:
        if path is not None and path.exists():
            layers.append((origin, f"from {path}", read_toml(path)))
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict(base.origins) if base else {}
    for origin, where, layer in reversed(layers):  # the first layer is laid on last
        for name, value in layer.items():
            if value is None:
                continue
            if name not in BY_NAME:
                raise ConfigError(f"{name!r} is no option{suggest(name, BY_NAME)}")
            one = BY_NAME[name]
            named = f"{one.variable} {where}" if origin == "environment" and one.flag else where
            values[name] = parse_option(one, value, named)
            origins[name] = origin
    values["origins"] = MappingProxyType(origins)
    requested = dataclasses.replace(base or Requested(), **values)
    refuse_contradictions(requested)
    return requested


def resolve_here(
    *, command_line: Mapping[str, object] | None = None, arguments: Mapping[str, object] | None = None
) -> Requested:
    """``resolve`` with what this process has: its environment, STRATA_HOME/config.toml, and the model's own file.

    The model may be named by any origin; its file is looked for once it is known.
    """
    home = find_home()

    def read(model_file: Path | None) -> Requested:
        return resolve(
            command_line=command_line,
            arguments=arguments,
            environment=os.environ,
            model_file=model_file,
            home_file=home.config_file,
        )

    try:
        requested = read(None)
        model_file = home.model_file(requested.model)
        return read(model_file) if model_file is not None and model_file.exists() else requested
    except OSError as error:  # of looking whether a file is there: reading one is read_toml's
        where = Path(error.filename or ".")
        raise ConfigError(
            f"{where} cannot be looked for: {error.strerror}",
            f"give this user the right to enter {where.parent}, or name another folder",
        ) from None


def refuse_contradictions(requested: Requested) -> None:
    """Options that cannot be served together, whoever set them."""
    if requested.mmap_experts and (requested.resident_experts or requested.resident_budget_gib is not None):
        other = "resident_experts" if requested.resident_experts else "resident_budget_gib"
        raise ConfigError(
            f"--mmap-experts ({requested.origin('mmap_experts')}) and {BY_NAME[other].flag} "
            f"({requested.origin(other)}) ask for different modes of the RAM tier",
            "leave one of the two out",
        )


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """One line for each ``STRATA_`` variable that no option reads, naming it and the likely intention."""
    known = {one.variable for one in OPTIONS} | set(OTHER_VARIABLES)
    names = os.environ if environment is None else environment
    strays = sorted(name for name in names if name.startswith(ENVIRONMENT_PREFIX) and name not in known)
    return [f"{name} is set but no option reads it{suggest(name, known)}" for name in strays]


@dataclass(frozen=True)
class Effect:
    """What became of one option in a resolved plan: in force, or refused, and why in one line."""

    option: str
    in_force: bool
    why: str = ""


def format_configuration(requested: Requested, effects: Iterable[Effect] = ()) -> str:
    """``--show-config``: every option, its value and origin, and whether it is in force or refused, with why."""
    by_option = {effect.option: effect for effect in effects}
    unknown = sorted(set(by_option) - set(BY_NAME))
    assert not unknown, f"effects of what is no option: {unknown}"
    rows = []
    for one in OPTIONS:
        effect = by_option.get(one.name, Effect(one.name, in_force=True))
        state = "in force" if effect.in_force else "refused"
        state += f": {effect.why}" if effect.why else ""
        rows.append((one.spelling, format_value(getattr(requested, one.name)), requested.origin(one.name), state))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )
