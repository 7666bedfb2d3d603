"""Which device computes: the card that was asked for, the first usable one, or the CPU, and the room it has.

Lives in ``engine`` because the choice joins what was requested, the machine and the kernels' word on whether a card
can be used. It plans nothing and takes no memory before ``open_device``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from strata.config import Requested
from strata.errors import ConfigError
from strata.memory.planner import GIB, format_bytes
from strata.memory.probe import Machine
from strata.memory.requests import DeviceRoom

if TYPE_CHECKING:
    from strata.kernels.backend import Backend
    from strata.kernels.cuda.cuda_device import CudaDevice
    from strata.kernels.cuda.driver import Card
    from strata.kernels.cuda.program import Machine as LaunchMachine

__all__ = ["RoundDevice", "card_index", "card_room", "choose_card", "open_device"]

logger = logging.getLogger(__name__)


class RoundDevice(Protocol):
    """What runs decode rounds: launches on a machine, memory from a backend (``kernels.cuda.cuda_device``)."""

    @property
    def machine(self) -> LaunchMachine: ...
    @property
    def backend(self) -> Backend: ...

    def close(self) -> None: ...


def card_index(requested: Requested) -> int:
    """The i of ``--device cuda:i``; 0 where none is named."""
    return int(requested.device.partition(":")[2] or 0)


def choose_card(requested: Requested, machine: Machine) -> Card | None:
    """The card to compute on, None for the CPU.

    ``cuda[:i]``: that card, or ``ConfigError`` naming what is missing. ``auto``: the first one; where there is a card
    that cannot be used, one log line says why and the CPU computes.
    """
    if requested.device == "cpu" or (requested.device == "auto" and not machine.gpus):
        return None
    from strata.kernels.cuda.cuda_device import check_card

    try:
        return check_card(card_index(requested))
    except ConfigError as error:
        if requested.device != "auto":
            raise
        logger.info("%s is not used, the CPU computes: %s", machine.gpus[0].name, error)
        return None


def open_device(requested: Requested, card: Card) -> CudaDevice:
    """A context on ``card`` under the cap of ``--vram-gib``. Raises ``ConfigError`` or ``EngineError``."""
    from strata.kernels.cuda import cuda_device

    cap = None if requested.vram_gib is None else int(requested.vram_gib * GIB)
    opened = cuda_device.open_device(card.index, cap_bytes=cap)
    logger.info("%s", opened.describe())
    return opened


def card_room(requested: Requested, machine: Machine, device: RoundDevice) -> DeviceRoom:
    """What a plan may use of an opened card: its free memory, its context already taken off, within ``--vram-gib``."""
    info = device.backend.info()
    free = info.memory_free
    if requested.vram_gib is not None and free < int(requested.vram_gib * GIB):
        logger.warning("--vram-gib %g: only %s of VRAM are free", requested.vram_gib, format_bytes(free))
    return DeviceRoom("cuda", info.memory_free, info.pins_charge_device, machine.pin_rooms)
