"""One small pack for the room's tests: it is only read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from model import SmallPack, write_pack

from strata.kernels.cpu.experts import ExpertKernel


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallPack, ExpertKernel]:
    return write_pack(tmp_path_factory.mktemp("pack"))
