"""The share of a round's misses that a card reads over its link by itself, where the user names none.

Lives in ``engine`` because it joins the rates of a card's link and of RAM. Who computes an expert changes no token, so
what is measured here decides about speed alone. It must not know experts or rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from strata.memory.bandwidth import measure_memory_read

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.engine.devices import RoundDevice

__all__ = ["choose_link_share"]

logger = logging.getLogger(__name__)
GIGA = 1e9


def choose_link_share(
    requested: Requested,
    device: RoundDevice | None,
    read_ram: Callable[[], float] = measure_memory_read,
    read_link: Callable[[RoundDevice], float | None] | None = None,
) -> float:
    """``--pcie-frac``; for ``auto`` the share with which link and CPU, each at the rate measured for it alone, end
    together. 0 without a card, and where there is no room to measure: the CPU computes every miss then. In FP32, as a
    card has it, so that both split alike."""
    return float(np.float32(_choose(requested, device, read_ram, read_link)))


def _choose(
    requested: Requested,
    device: RoundDevice | None,
    read_ram: Callable[[], float],
    read_link: Callable[[RoundDevice], float | None] | None,
) -> float:
    if not isinstance(requested.pcie_frac, str):
        return requested.pcie_frac
    if device is None:
        return 0.0
    link = (read_link or _read_link)(device)
    ram = None if link is None else _or_none(read_ram)
    if link is None or ram is None:
        what = "the link" if link is None else "RAM"
        logger.info("pcie-frac auto: 0, because there is no room to measure %s; --pcie-frac F gives a share", what)
        return 0.0
    share = link / (link + ram)
    logger.info(
        "pcie-frac auto: %.2f of a round's misses over the link (%.1f GB/s; RAM %.1f GB/s)",
        share, link / GIGA, ram / GIGA,
    )  # fmt: skip
    return share


def _or_none(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except MemoryError:
        return None


def _read_link(device: RoundDevice) -> float | None:
    """Bytes a second of pieces as large as experts; None where it is no real card or there is no room."""
    from strata.kernels.cuda.card_rates import measure_link
    from strata.kernels.cuda.device import CudaMachine

    return measure_link(device.backend) if isinstance(device.machine, CudaMachine) else None
