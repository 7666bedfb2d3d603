"""Every kernel of the package compiles for every card that Strata serves; needs the compiler and no card.

What was compiled is kept beside pytest's own cache under the key of all that decides it, so only what changed is
compiled again.
"""

from __future__ import annotations

import heapq
import re
import struct
from pathlib import Path

import pytest

from strata.kernels.cuda.compile import ARCHITECTURES, compile_kernels, list_kernels, list_units
from strata.paths import Home
from tests.emulator.compile import load

ELF = b"\x7fELF"


@pytest.fixture(scope="session")
def kept(pytestconfig: pytest.Config) -> Home:
    assert pytestconfig.cache is not None
    return Home(Path(pytestconfig.cache.mkdir("strata")))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", list_kernels())
def test_it_compiles(name: str, architecture: int, kept: Home) -> None:
    found = compile_kernels([name], architecture, (13, 0), kept)
    assert {one.file for one in found.values()} == {name}
    assert all(one.image[:4] == ELF for one in found.values())


def entries(image: bytes) -> list[str]:
    """Kernels of a cubin, by the names of its sections: '.text.NAME' (ELF, 64 bits)."""
    at, (size, count, names) = struct.unpack_from("<Q", image, 0x28)[0], struct.unpack_from("<3H", image, 0x3A)
    offset = struct.unpack_from("<Q", image, at + names * size + 0x18)[0]
    found = []
    for section in range(count):
        start = offset + struct.unpack_from("<I", image, at + section * size)[0]
        name = image[start : image.index(b"\0", start)].decode()
        if name.startswith(".text."):
            found.append(name.removeprefix(".text."))
    return found


@pytest.mark.parametrize("name", list_kernels())
def test_an_entry_is_in_one_part(name: str, kept: Home) -> None:
    by_part = [entries(one.image) for one in compile_kernels([name], 90, (13, 0), kept).values()]
    assert all(by_part), "a part without a kernel"
    found = [entry for part in by_part for entry in part]
    assert len(set(found)) == len(found)
    whole = Path(load(name)._library._name).read_bytes()  # as the emulation reads the file
    held = {entry.decode() for entry in re.findall(rb"\0emulated_(\w+)(?=\0)", whole)} - {"strata_emulated_late"}
    assert sorted(found) == sorted(held)


def test_compiling_takes_its_limits_at_a_first_start(kept: Home) -> None:
    """By the size of machine code, since clocks differ: a core of 2 to 3 GHz was seen to make 45 to 65 kB a second.

    8 s with 16 processors, 15 with 8: whoever adds kernels splits the file (parts.h), or makes less of them.
    """
    found = compile_kernels(list_kernels(), 90, (13, 0), kept)
    sizes = {unit: len(one.image) for unit, one in found.items()}
    order = [unit.unit for unit in list_units(list_kernels())]
    assert sorted(order) == sorted(sizes)
    for unit, size in sizes.items():
        assert size <= sizes.get(unit.partition("-")[0] + "-0", size), f"part 0 is not the largest, {unit} is"
    for processors, seconds in ((16, 8), (8, 15)):
        ends = [0] * processors
        for unit in order:
            heapq.heappush(ends, heapq.heappop(ends) + sizes[unit])
        assert max(ends) / 45_000 <= seconds, f"{max(ends):,} bytes one after the other on {processors} processors"
