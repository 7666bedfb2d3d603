"""Measures this machine for a forecast, once.

Lives in ``engine`` because what a machine does a second is measured in several rooms: memory and drive, kernels, the
cost of a layer and of experts in a file. It must not know how a forecast uses the numbers.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from strata.engine.file_costs import measure_file
from strata.engine.layer_costs import measure_layers
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.rates import Rates, RatesKey, rates_key, read_rates, threads_asked, write_rates
from strata.engine.runtime import kv_format
from strata.errors import ConfigError
from strata.experts.source import BlobPlace
from strata.kernels.cpu import pool
from strata.kernels.rates import measure_kernels
from strata.memory.bandwidth import measure_bandwidths
from strata.memory.probe import probe_machine
from strata.models.known_shapes import PROBE_SHAPES
from strata.paths import find_home

if TYPE_CHECKING:
    from strata.config import Requested

__all__ = ["measure_rates"]

logger = logging.getLogger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def measure_rates(requested: Requested) -> Rates:
    """Measures what a forecast of the model asked for needs, keeps it beside what is known, and returns all of it.

    (Re)starts the thread pool. Raises ``ConfigError`` where RAM or the drive has no room for it, and before anything is
    measured where STRATA_HOME cannot be written. What cannot be kept afterwards is returned all the same, and logged.
    """
    subject = find_subject(requested.model, kv_format(requested))
    home = find_home()
    folder = home.make(home.calibration)
    _check_writable(folder)
    key = rates_key(pool.configure(threads_asked(requested)))
    known = read_rates(folder, key)
    began = time.perf_counter()
    try:
        rates = _measure(subject, requested, key.threads)
    except (MemoryError, OSError) as error:
        raise ConfigError(f"this machine cannot be measured: {error}", "free some RAM or disk and try again") from error
    seconds = time.perf_counter() - began
    if known is not None:
        experts = {**known.kernels.experts, **rates.kernels.experts}
        kernels = dataclasses.replace(rates.kernels, experts=experts)
        rates = dataclasses.replace(rates, kernels=kernels, layers={**known.layers, **rates.layers})
    _keep(folder, key, rates, seconds)
    return rates


def _check_writable(folder: Path) -> None:
    """Raises ``ConfigError`` where no file can be made: measuring is long, and nobody wants it to be for once.

    A full drive may have room in a moment, and tells its speed all the same.
    """
    attempt = folder / f".writable-{secrets.token_hex(6)}.partial"
    try:
        attempt.touch(exist_ok=False)
        attempt.unlink()
    except OSError as error:
        if error.errno in NO_ROOM:
            return
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}", "set STRATA_HOME to a folder that you can write"
        ) from None


def _keep(folder: Path, key: RatesKey, rates: Rates, seconds: float) -> None:
    """Says in one line what became of what was measured."""
    try:
        path = write_rates(folder, key, rates)
    except OSError as error:
        path = key.path(folder)
        wayout = "free some disk" if error.errno in NO_ROOM else "set STRATA_HOME to a folder that you can write"
        logger.warning(
            "measured this machine in %.1f s for this once: %s cannot be written: %s; %s and measure again",
            seconds,
            path,
            error.strerror,
            f"remove the folder {path.name}" if path.is_dir() else wayout,
        )
    else:
        logger.info("measured this machine in %.1f s; kept as STRATA_HOME/calibration/%s", seconds, path.name)


def _measure(subject: PlanSubject, requested: Requested, threads: int) -> Rates:
    # Two seconds each, and all other numbers are of any family.
    layers = {family: measure_layers(family, requested.threads) for family in PROBE_SHAPES}
    pool.configure(threads)
    kernels = measure_kernels(subject.expert_format)
    folder, places = find_home().calibration, subject.expert_sample
    bandwidths = measure_bandwidths(
        folder,
        num_threads=threads,
        num_cpus=probe_machine().num_cpus,
        sample=places[0].path if places else None,
    )
    sample = [BlobPlace(place.path, place.offset, place.nbytes, place.checksum) for place in places]
    file = measure_file(folder, subject.layout, sample, threads)
    return Rates(bandwidths, kernels, layers, file)
