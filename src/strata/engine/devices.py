"""Which device computes: the card that was asked for, the first usable one, or the CPU, and the room it has.

Lives in ``engine`` because the choice joins what was requested, the machine and the kernels' word on whether a card
can be used. It plans nothing and takes no memory before ``open_device``.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from strata.config import Requested
from strata.engine.early_card import card_index
from strata.errors import ConfigError, MemoryPlanError
from strata.kernels.backend import DeviceMemoryFull
from strata.memory.planner import GIB, MIB, ResolvedPlan, format_bytes
from strata.memory.probe import Machine
from strata.memory.requests import DeviceRoom

if TYPE_CHECKING:
    from strata.kernels.backend import Backend
    from strata.kernels.cuda.cuda_device import CudaDevice
    from strata.kernels.cuda.driver import Card
    from strata.kernels.cuda.program import Machine as LaunchMachine

__all__ = [
    "RoundDevice",
    "card_room",
    "choose_card",
    "compile_kernels",
    "give_back_tensors",
    "has_tensor_cores",
    "hold_to_plan",
    "named_refusals",
    "open_device",
]

logger = logging.getLogger(__name__)


class RoundDevice(Protocol):
    """What runs decode rounds: launches on a machine, memory from a backend (``kernels.cuda.cuda_device``)."""

    @property
    def machine(self) -> LaunchMachine: ...
    @property
    def backend(self) -> Backend: ...

    def close(self) -> None: ...


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

    give_back_tensors()  # of a load that failed: what is free is measured at the opening
    cap = None if requested.vram_gib is None else int(requested.vram_gib * GIB)
    opened = cuda_device.open_device(card.index, cap_bytes=cap)
    logger.info("%s", opened.describe())
    return opened


def compile_kernels(device: RoundDevice) -> None:
    """All of a card's kernels at once, where its machine code is not kept yet. Raises ``EngineError``."""
    from strata.kernels.cuda.cuda_device import CudaDevice

    if isinstance(device, CudaDevice):
        device.machine.compile_all()


def give_back_tensors() -> None:
    """Gives the driver the memory of torch's dead tensors, of those that wait in a cycle too."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where torch has not begun to use a card


def card_room(requested: Requested, machine: Machine, device: RoundDevice) -> DeviceRoom:
    """What a plan may use of an opened card: its free memory, its context already taken off, within ``--vram-gib``."""
    from strata.kernels.cuda.cuda_device import CudaDevice

    if isinstance(device, CudaDevice):
        device.trim()
    info = device.backend.info()
    free = info.memory_free
    if requested.vram_gib is not None and free < int(requested.vram_gib * GIB):
        logger.warning("--vram-gib %g: only %s of VRAM are free", requested.vram_gib, format_bytes(free))
    is_capped = requested.vram_gib is not None and free == int(requested.vram_gib * GIB)
    return DeviceRoom("cuda", free, info.pins_charge_device, machine.pin_rooms, is_capped)


def hold_to_plan(device: RoundDevice, plan: ResolvedPlan) -> Callable[[], None]:
    """Holds torch's tensors on a card to what the plan leaves beside the expert slots, until the result is called.

    Raises ``MemoryPlanError`` where another program took memory since the plan.
    """
    from strata.kernels.cuda.cuda_device import CudaDevice

    if not isinstance(device, CudaDevice) or plan.device.free_bytes is None:
        return lambda: None
    slots = plan.num_device_slots * plan.stride
    planned = plan.vram_bytes - slots - plan.vram["reserve"]
    with named_refusals(device, "the dense weights, state and buffers"):
        return device.backend.share_with_torch(planned, plan.device.free_bytes - slots).release


def has_tensor_cores(device: RoundDevice) -> bool:
    """Whether a card, or its emulation, reads prompts in chunks."""
    from strata.kernels.cuda.cuda_device import CudaDevice
    from strata.kernels.cuda.prompt.frame import TENSOR_ARCHITECTURE

    return not isinstance(device, CudaDevice) or device.card.architecture >= TENSOR_ARCHITECTURE


@contextmanager
def named_refusals(device: RoundDevice, what: str) -> Iterator[None]:
    """Turns a refused allocation of device memory, the backend's or torch's, into an error that names ``what``."""
    try:
        yield
    except (DeviceMemoryFull, torch.OutOfMemoryError) as error:
        free = device.backend.info().memory_free
        asked = error.asked if isinstance(error, DeviceMemoryFull) else 0
        raise MemoryPlanError(
            f"no room for {what}{f' ({format_bytes(asked)})' if asked else ''}: only {free // MIB} MiB of VRAM free",
            "another program took memory since the plan: try again, or raise --vram-reserve-mib",
            short_bytes=max(0, asked - free),
        ) from error
