"""Measures this machine for a forecast, once.

Lives in ``engine`` because what a machine does a second is measured in several rooms: memory and drive, kernels, the
cost of a layer and of experts in a file. It must not know how a forecast uses the numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from strata.engine.file_costs import measure_file
from strata.engine.layer_costs import measure_layers
from strata.engine.plan_subject import PlanSubject, find_subject
from strata.engine.rates import Rates, rates_key, read_rates, threads_asked, write_rates
from strata.engine.runtime import kv_format
from strata.errors import ConfigError
from strata.experts.source import BlobPlace
from strata.kernels.cpu import pool
from strata.kernels.rates import measure_kernels
from strata.memory.bandwidth import measure_bandwidths
from strata.memory.probe import probe_machine
from strata.paths import find_home

if TYPE_CHECKING:
    from strata.config import Requested

__all__ = ["measure_rates"]

logger = logging.getLogger(__name__)


def measure_rates(requested: Requested) -> Rates:
    """Measures what a forecast of the model asked for needs, keeps it beside what is known, and returns all of it.

    (Re)starts the thread pool. Raises ``ConfigError`` where RAM or STRATA_HOME has no room for it.
    """
    subject = find_subject(requested.model, kv_format(requested))
    home = find_home()
    folder = home.make(home.calibration)
    threads = pool.configure(threads_asked(requested))
    began = time.perf_counter()
    try:
        rates = _measure(subject, requested, threads)
    except (MemoryError, OSError) as error:
        raise ConfigError(f"this machine cannot be measured: {error}", "free some RAM or disk and try again") from error
    known = read_rates(folder, rates_key(threads))
    if known is not None:
        experts = {**known.kernels.experts, **rates.kernels.experts}
        kernels = dataclasses.replace(rates.kernels, experts=experts)
        rates = dataclasses.replace(rates, kernels=kernels, layers={**known.layers, **rates.layers})
    path = write_rates(folder, rates_key(threads), rates)
    seconds = time.perf_counter() - began
    logger.info("measured this machine in %.1f s; kept as STRATA_HOME/calibration/%s", seconds, path.name)
    return rates


def _measure(subject: PlanSubject, requested: Requested, threads: int) -> Rates:
    family = subject.config.family
    costs = measure_layers(family, requested.threads)
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
    return Rates(bandwidths, kernels, {family: costs}, file)
