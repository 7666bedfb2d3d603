"""Measures this machine for a forecast, once, and finds what was measured before.

Lives in ``engine`` because what a machine does a second is measured in three rooms: memory and drive, kernels, and the
cost of a layer. It must not know how a forecast uses the numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from strata.engine.layer_costs import measure_layers
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.rates import Rates, RatesKey, read_rates, write_rates
from strata.engine.runtime import kv_format
from strata.errors import ConfigError
from strata.kernels.cpu import pool
from strata.kernels.cpu.library import isa
from strata.kernels.rates import measure_kernels
from strata.memory.bandwidth import measure_bandwidths
from strata.memory.probe import read_cpu_name
from strata.paths import find_home
from strata.version import VERSION

if TYPE_CHECKING:
    from strata.config import Requested

__all__ = ["kept_rates", "measure_rates"]

logger = logging.getLogger(__name__)


def kept_rates(requested: Requested) -> Rates | None:
    """What was measured of this machine by this version with as many threads; None where nothing was."""
    return read_rates(find_home().calibration, _key(_threads(requested)))


def measure_rates(requested: Requested) -> Rates:
    """Measures what a forecast of the model asked for needs, keeps it beside what is known, and returns all of it.

    (Re)starts the thread pool. Raises ``ConfigError`` where RAM or STRATA_HOME has no room for it.
    """
    subject = find_subject(requested.model, kv_format(requested))
    home = find_home()
    folder = home.make(home.calibration)
    threads = pool.configure(_threads(requested))
    began = time.perf_counter()
    try:
        rates = _measure(subject, requested, threads)
    except (MemoryError, OSError) as error:
        raise ConfigError(f"this machine cannot be measured: {error}", "free some RAM or disk and try again") from error
    known = read_rates(folder, _key(threads))
    if known is not None:
        experts = {**known.kernels.experts, **rates.kernels.experts}
        kernels = dataclasses.replace(rates.kernels, experts=experts)
        rates = dataclasses.replace(rates, kernels=kernels, layers={**known.layers, **rates.layers})
    path = write_rates(folder, _key(threads), rates)
    seconds = time.perf_counter() - began
    logger.info("measured this machine in %.1f s; kept as STRATA_HOME/calibration/%s", seconds, path.name)
    return rates


def _measure(subject: PlanSubject, requested: Requested, threads: int) -> Rates:
    family = subject.config.family
    costs = measure_layers(family, requested.threads)
    pool.configure(threads)
    kernels = measure_kernels(subject.expert_format)
    bandwidths = measure_bandwidths(find_home().calibration, num_threads=threads, sample=subject.expert_file)
    return Rates(bandwidths, kernels, {family: costs})


def _threads(requested: Requested) -> int:
    return pool.default_threads() if isinstance(requested.threads, str) else requested.threads


def _key(threads: int) -> RatesKey:
    return RatesKey(read_cpu_name(), isa(), threads, VERSION)
