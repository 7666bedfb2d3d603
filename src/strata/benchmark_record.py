"""The one file format of measured figures: benchmarks/results/<machine>/<name>.json, and the JSON line at the end.

Lives on top because the scripts in ``benchmarks/`` and the bench command both write it. A record is published with
the project, so it holds no absolute path, host name or user name; one that does is refused. It knows nothing of
what is measured.
"""

from __future__ import annotations

import datetime
import getpass
import json
import platform
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from strata import version
from strata.errors import ConfigError
from strata.files import atomic_write, read_regular

__all__ = ["LARGEST", "Figure", "Record", "check_folder", "measured", "read_kept", "record_path", "written_to"]

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
ABSOLUTE_PATH = re.compile(r"(?:^|[\s\"'=:,(])(?:~|/[\w.-]+/[\w./-]|[A-Za-z]:[\\/])")


LARGEST = 1e18  # above every figure that there is
PROBE_BYTES = 1 << 16  # more than a record
RESULTS = "benchmarks/results"  # earlier results make no measurement another one


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of ``runs`` runs (kernels: the best pass), and the bound that it is held against.

    ``ceiling`` is in the same unit; ``percent`` follows from it. The other fields say under which circumstances the
    figure holds and stay None where they mean nothing.
    """

    value: float
    unit: str
    ceiling: float | None = None
    min: float | None = None
    max: float | None = None
    runs: int = 1
    vram_gib: float | None = None
    max_context: int | None = None
    kv: str | None = None
    dense: str | None = None
    routing: str | None = None
    hit_rate: float | None = None
    context_tokens: int | None = None

    @property
    def percent(self) -> float | None:
        return round(100 * self.value / self.ceiling, 1) if self.ceiling else None

    def as_json(self) -> dict[str, object]:
        table = asdict(self)
        items = list(table.items())
        items.insert(3, ("percent", self.percent))
        return {name: value for name, value in items if value is not None}


def measured(values: Sequence[float], unit: str, ceiling: float | None = None) -> Figure:
    """The figure of several runs: their median, least and greatest."""
    if not values:
        raise ValueError("no runs")
    return Figure(statistics.median(values), unit, ceiling=ceiling, min=min(values), max=max(values), runs=len(values))


@dataclass(frozen=True)
class Record:
    """What one benchmark found on one machine. ``command`` is what to type; ``machine`` the machine in numbers."""

    command: str
    machine: Mapping[str, object]
    figures: Mapping[str, Figure]
    commit: str = field(default_factory=lambda: version.commit().removesuffix("-dirty"))
    dirty: bool = field(default_factory=lambda: version.commit(RESULTS).endswith("-dirty"))
    when: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    def as_json(self) -> dict[str, object]:
        """The record as plain data. Raises ConfigError if it holds a path or a name that is nobody's business."""
        table: dict[str, object] = {
            "command": self.command,
            "commit": self.commit,
            "dirty": self.dirty,
            "when": self.when,
            "machine": dict(self.machine),
            "figures": {name: figure.as_json() for name, figure in self.figures.items()},
        }
        refuse_private(table)
        return table

    def line(self) -> str:
        """The last line that a benchmark prints."""
        return json.dumps(self.as_json(), allow_nan=False)

    def merge_into(self, path: Path) -> None:
        """Writes the record with the figures and facts that ``path`` holds beside its own; figures of another commit
        say which.

        Raises ``ConfigError`` for a file that is no record.
        """
        table = self.as_json()
        before = read_kept(path)
        if before is not None:
            other = {} if before.commit == self.commit else {"commit": before.commit, "when": before.when}
            kept = {name: other | dict(one) for name, one in before.figures.items() if name not in self.figures}
            table["machine"] = dict(before.machine) | dict(self.machine)
            table["figures"] = kept | dict(cast("dict[str, object]", table["figures"]))
            refuse_private(table)
        _write(table, path)

    def write(self, path: Path) -> None:
        """Writes the record whole or not at all; creates the machine's folder."""
        _write(self.as_json(), path)


class KeptRecord(NamedTuple):
    """What a record's file holds that another is merged into; ``figures`` and ``machine`` as plain data."""

    commit: str
    when: str
    machine: Mapping[str, object]
    figures: Mapping[str, Mapping[str, object]]


def read_kept(path: Path) -> KeptRecord | None:
    """None where there is no such file. Raises ``ConfigError`` for one that is no record."""
    if not path.exists():
        return None
    try:
        table = json.loads(read_regular(path), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "make it readable, or move it away") from error
    except (ValueError, RecursionError) as error:
        raise _no_record(path, str(error)) from error
    if not isinstance(table, dict):
        raise _no_record(path, "it is no table")
    for name, kind in (("commit", str), ("when", str), ("machine", dict), ("figures", dict)):
        if not isinstance(table.get(name), kind):
            raise _no_record(path, f"{name} is {'missing' if name not in table else 'of the wrong type'}")
    for name, figure in table["figures"].items():
        if not isinstance(figure, dict) or not isinstance(figure.get("unit"), str):
            raise _no_record(path, f"figure {name} has no unit")
        for part in ("value", "min", "max", "ceiling", "percent", "runs"):
            number = figure.get(part, None if part == "value" else 0)
            if number is None:
                raise _no_record(path, f"figure {name} has no {part}")
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < LARGEST:
                raise _no_record(path, f"figure {name} has {part} {number!r:.40}")
    try:
        refuse_private(table)
    except ConfigError as error:
        raise _no_record(path, error.message) from error
    return KeptRecord(table["commit"], table["when"], table["machine"], table["figures"])


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is no number of JSON")


def _no_record(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is no benchmark record: {why}", "move it away")


def _write(table: Mapping[str, object], path: Path) -> None:
    text = json.dumps(table, indent=2, allow_nan=False) + "\n"
    with written_to(path.parent), atomic_write(path, "w") as handle:
        handle.write(text)


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Makes ``folder``; what keeps the block from writing there is a ``ConfigError`` of one line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}",
            "name a folder on a drive with room that may be written",
        ) from error


def check_folder(folder: Path) -> None:
    """Before anything is measured for it: raises ``ConfigError`` where a file cannot be made there."""
    with written_to(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0" * PROBE_BYTES)
        file.flush()


def record_path(results: Path, machine: str, name: str) -> Path:
    """``<results>/<machine>/<name>.json``; both names are lower-case words."""
    for word in (machine, name):
        if not NAME.fullmatch(word):
            raise ConfigError(
                f"{word!r} is no name of a machine or a benchmark", "use lower-case letters, digits, - and ."
            )
    return results / machine / f"{name}.json"


def texts_of(value: object, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{where} key", str(key)
            yield from texts_of(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_of(inner, where)


def refuse_private(table: Mapping[str, object]) -> None:
    """Raises ConfigError for the first text with an absolute path, this host's name, or this user's name."""
    names = {name for name in (platform.node(), platform.node().partition(".")[0], user_name()) if len(name) > 1}
    for where, text in texts_of(table, "record"):
        if ABSOLUTE_PATH.search(text):
            raise ConfigError(f"{where} holds an absolute path: {text!r}", "give paths relative to the current folder")
        for name in names:
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
                raise ConfigError(f"{where} names this host or user: {text!r}", "leave the name out")


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this user id
        return ""
