"""Sizes at which kernels change their path are asked of the library, and none of the source is missing there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata.kernels.cpu.blocks import row_blocks
from strata.kernels.cpu.library import ISA_LEVELS, available_isa_levels, isa, select_isa

# Constants of this kind: rows of a block, of a tile or of a slab, queries of a pass, entries of a split. How many rows
# a thread claims at once (kRowsPerUnit) is none: splitting work decides no result, whatever the number of rows.
SIZE = re.compile(r"^constexpr (?:int|int64_t|long) (k\w*Rows|kRowsAtOnce|kQueries|kSplit) = ([^;]+);", re.M)


def in_source(root: Path) -> dict[str, set[int | str]]:
    found: dict[str, set[int | str]] = {}
    for path in sorted((root / "csrc" / "cpu").iterdir()):
        for name, value in SIZE.findall(path.read_text()):
            found.setdefault(name, set()).add(int(value) if value.isdigit() else value)
    return found


def test_every_size_of_the_source_is_listed(root: Path) -> None:
    names = {name for name in row_blocks() if name.isidentifier()}
    assert names == set(in_source(root))


def test_sizes_are_those_of_the_source_at_every_level(root: Path) -> None:
    source, before = in_source(root), isa()
    try:
        for level in available_isa_levels():
            select_isa(level)
            for name, size in row_blocks().items():
                wanted = source.get(name, {2 * row_blocks()["kSlabRows"]})
                assert size in wanted or any(isinstance(one, str) for one in wanted), (level, name, size)
    finally:
        select_isa(before)


@pytest.mark.parametrize("level", ISA_LEVELS)
def test_a_level_has_its_own_tiles(level: str) -> None:
    if level not in available_isa_levels():
        return
    before = isa()
    select_isa(level)
    tiles = row_blocks()["kTileRows"]
    select_isa(before)
    assert tiles == {"scalar": 1, "avx2": 3, "avxvnni": 3, "avx512": 6}[level]
