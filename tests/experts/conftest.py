"""One small pack for the room's tests: it is only read."""

from __future__ import annotations

import pytest

from strata.kernels.cpu.experts import ExpertKernel
from tests.experts.small_model import SmallPack, write_pack


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallPack, ExpertKernel]:
    return write_pack(tmp_path_factory.mktemp("pack"))
