"""A card for tests: kernels emulated on the CPU, memory of a ``HostBackend`` that can fail on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata.engine import device_rounds
from strata.engine import proof as proof_module
from strata.engine import runtime as runtime_module
from strata.engine.runtime import Runtime
from strata.kernels.host import HostBackend, HostFaults
from tests.emulator.machine import EmulatedMachine
from tests.engine.runtimes import open_runtime


class EmulatedDevice:
    """``RoundDevice`` of tests."""

    def __init__(self, nbytes: int = 1 << 30, faults: HostFaults = HostFaults(), *, backward: bool = False) -> None:
        self.machine = EmulatedMachine(backward=backward)
        self.backend = HostBackend(nbytes, faults)

    def describe(self) -> str:
        return "an emulated card"

    def close(self) -> None:
        self.backend.close()


@contextmanager
def emulated_card() -> Iterator[None]:
    """``--device cuda`` is an emulated card inside, for what opens its own device; a round has a minute."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (runtime_module, proof_module):
            patch.setattr(module, "choose_card", lambda *_: object())
        patch.setattr(runtime_module, "open_device", lambda *_: EmulatedDevice())
        for name in ("ROUND_LIMIT_MS", "FILE_ROUND_LIMIT_MS"):
            patch.setattr(device_rounds, name, 60_000)
        yield


@contextmanager
def device_runtime(path: Path, device: EmulatedDevice | None = None, **options: Any) -> Iterator[Runtime]:
    """A runtime over a pack whose rounds run on an emulated card."""
    device = device or EmulatedDevice()
    given = {"max_context": 512, "ram_gib": 6, "vram_reserve_mib": 0, **options}
    try:
        with open_runtime(path, device, **given) as runtime:
            assert runtime.rounds is not None
            runtime.rounds.limit_ms = 60_000  # an emulated kernel takes a thousand times a real one's time
            yield runtime
    finally:
        device.close()
