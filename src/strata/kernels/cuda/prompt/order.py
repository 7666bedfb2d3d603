"""The stream that a prompt's compute runs in: torch's calls, launches of our own, and events for the copies' stream.

Lives in ``kernels/cuda/prompt`` because it joins a machine's stream, torch and a backend's events. On an emulated card
everything is complete when its call returns. It must not know what is computed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from strata.kernels.cuda.backend import CudaBackend
from strata.kernels.cuda.device import CudaMachine
from strata.kernels.cuda.driver import ask

if TYPE_CHECKING:
    from strata.kernels.backend import Backend, DeviceEvent
    from strata.kernels.cuda.program import Launch, Machine

__all__ = ["CardCompute", "EmulatedCompute", "compute_of"]


class CardCompute:
    """On a card: the machine's own stream, in which rounds run too."""

    def __init__(self, machine: CudaMachine, backend: CudaBackend) -> None:
        self._machine, self._backend = machine, backend

    def scope(self) -> AbstractContextManager[Any]:
        """torch's calls inside are enqueued here, by the calling thread."""
        self._machine.context.use()
        return torch.cuda.stream(self._machine.torch_stream)

    def launch(self, launches: list[Launch]) -> None:
        self._machine.run_eagerly(launches)

    def wait(self, event: DeviceEvent) -> None:
        context = self._machine.context
        ask(context.driver.cuStreamWaitEvent(self._machine.stream, event.handle, 0), "waiting for a copy")  # type: ignore[attr-defined]

    def record(self) -> DeviceEvent | None:
        event = self._backend.event()
        ask(self._machine.context.driver.cuEventRecord(event.handle, self._machine.stream), "recording an event")
        return event

    def synchronize(self) -> None:
        self._machine.synchronize()


class EmulatedCompute:
    """On the CPU: what is asked for is done at once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def launch(self, launches: list[Launch]) -> None:
        self._machine.prepare(launches).run()
        self._machine.synchronize()

    def wait(self, event: DeviceEvent) -> None:
        event.synchronize()

    def record(self) -> DeviceEvent | None:
        return None

    def synchronize(self) -> None:
        self._machine.synchronize()


def compute_of(machine: Machine, backend: Backend) -> CardCompute | EmulatedCompute:
    if isinstance(machine, CudaMachine):
        assert isinstance(backend, CudaBackend), "a card's memory"
        return CardCompute(machine, backend)
    return EmulatedCompute(machine)
