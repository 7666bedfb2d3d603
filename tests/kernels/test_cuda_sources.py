"""Every kernel of the package compiles for every card that Strata serves; needs the compiler and no card.

What was compiled is kept beside pytest's own cache under the key of all that decides it, so only what changed is
compiled again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.kernels.cuda.compile import ARCHITECTURES, compile_kernels, list_kernels
from strata.paths import Home

ELF = b"\x7fELF"


@pytest.fixture(scope="session")
def kept(pytestconfig: pytest.Config) -> Home:
    assert pytestconfig.cache is not None
    return Home(Path(pytestconfig.cache.mkdir("strata")))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", list_kernels())
def test_it_compiles(name: str, architecture: int, kept: Home) -> None:
    assert compile_kernels([name], architecture, (13, 0), kept)[name].image[:4] == ELF
