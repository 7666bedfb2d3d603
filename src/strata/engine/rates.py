"""What a machine does a second, as plain numbers: the measured half of a forecast. Kept in STRATA_HOME/calibration.

Lives in ``engine`` because memory, kernels and layers are measured in different rooms and meet here. Measuring is
``calibration.py``'s. Numbers of another machine, another number of threads or another version are never used: they
are part of the file's name and of what is in it. What a file must hold is ``rates_schema.py``'s.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.files import atomic_write, read_regular
from strata.kernels.cpu import pool
from strata.kernels.cpu.library import isa
from strata.kernels.rates import ByRows, KernelRates
from strata.memory.bandwidth import Bandwidths
from strata.memory.probe import read_cpu_name
from strata.memory.system import system
from strata.paths import find_home
from strata.version import VERSION

if TYPE_CHECKING:
    from strata.config import Requested

__all__ = [
    "FileCosts",
    "LayerCosts",
    "Rates",
    "RatesKey",
    "kept_rates",
    "rates_key",
    "read_rates",
    "threads_asked",
    "write_rates",
]

logger = logging.getLogger(__name__)

LAYOUT = 8  # of the file; rises whenever what is measured changes, so that old numbers are not taken for new ones


@dataclass(frozen=True)
class LayerCosts:
    """Seconds that a layer of a family costs beside its arithmetic: launches, waking threads, the conductor.

    ``a_round``: of one row. ``a_row``: of each row of a long chunk, and ``a_pick`` of each of its picks. ``a_load``: of
    each expert that a prompt moves into the ring.
    """

    a_round: float
    a_row: float
    a_pick: float
    a_load: float


@dataclass(frozen=True)
class FileCosts:
    """Seconds that a layer takes longer than from memory, by the bytes of an expert and then how many of them it reads
    from a file: what the page cache holds, and past it. ``drive`` None: nothing is read past the page cache here.
    """

    cached: Mapping[int, ByRows]
    drive: Mapping[int, ByRows] | None


@dataclass(frozen=True)
class Rates:
    """``layers`` by family. ``file`` None: the drive had no room to measure it."""

    bandwidths: Bandwidths
    kernels: KernelRates
    layers: Mapping[str, LayerCosts]
    file: FileCosts | None


@dataclass(frozen=True)
class RatesKey:
    """What rates hold for."""

    cpu: str
    isa: str
    threads: int
    version: str
    layout: int = LAYOUT

    def path(self, folder: Path) -> Path:
        words = json.dumps(asdict(self), sort_keys=True)
        return folder / f"rates-{hashlib.sha256(words.encode()).hexdigest()[:12]}.json"


def rates_key(threads: int) -> RatesKey:
    """Of this machine and version with so many threads."""
    return RatesKey(read_cpu_name(), isa(), threads, VERSION)


def threads_asked(requested: Requested, busy: int = 0) -> int:
    """Threads of the pool; ``auto`` leaves out ``busy`` processors and stays within the control groups' quota."""
    if isinstance(requested.threads, str):
        return pool.default_threads(busy, system.cpu_quota())
    return requested.threads


def kept_rates(requested: Requested) -> Rates | None:
    """What was measured of this machine by this version with as many threads; None where nothing was."""
    return read_rates(find_home().calibration, rates_key(threads_asked(requested)))


def write_rates(folder: Path, key: RatesKey, rates: Rates) -> Path:
    """Writes them whole or not at all. ``OSError`` passes through."""
    path = key.path(folder)
    with atomic_write(path, "w") as handle:
        json.dump({"key": asdict(key), "rates": asdict(rates)}, handle, indent=1)
        handle.write("\n")
    return path


def read_rates(folder: Path, key: RatesKey) -> Rates | None:
    """The rates kept for this key; None where there are none, or where the file is damaged, which is logged once."""
    path = key.path(folder)
    try:
        text = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn(path, error.strerror or str(error), "remove it and 'strata plan --measure' writes it anew")
        return None
    from strata.engine.rates_schema import parse_rates  # pydantic, where there is something to check

    try:
        return parse_rates(text, asdict(key))
    except ValueError as error:
        _warn(path, str(error), "'strata plan --measure' writes it anew")
        return None


@functools.cache  # one command reads the file several times
def _warn(path: Path, why: str, hint: str) -> None:
    logger.warning("%s is not used, as if this machine was not measured: %s; %s", path, why, hint)
