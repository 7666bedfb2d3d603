"""Tables gathered from their file: many rows on many threads, and a damaged one named whatever the timing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strata.checkpoint.table_rows import TableFile, TableFormat, encode_rows, row_bytes
from strata.errors import CheckpointError
from strata.kernels.cpu import pool

ROWS, COLUMNS = 300, 20


@pytest.fixture(params=["f32", "bf16", "q8_0", "f8_e4m3"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, TableFormat]:
    format: TableFormat = request.param
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
    scales = torch.linspace(0.5, 2, ROWS)
    if format == "f8_e4m3":
        values = values.to(torch.float8_e4m3fn)
    parts = [encode_rows(values[at : at + 70], format, at, scales[at : at + 70]) for at in range(0, ROWS, 70)]
    path = tmp_path / "table.rows"
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    assert path.stat().st_size == ROWS * row_bytes(COLUMNS, format)
    return path, format


def open_table(written: tuple[Path, TableFormat]) -> TableFile:
    return TableFile(written[0], ROWS, COLUMNS, written[1])


def mirror_word(row: bytes, number: int) -> int:
    """docs/reference/pack-format.md in plain integers."""
    total = sum(byte * ((at * 0x9E3779B1 & 0xFFFFFFFF) | 1) for at, byte in enumerate(row, start=1))
    return (total + number * 0x85EBCA77 + 0xC2B2AE3D) & 0xFFFFFFFF


def test_check_words_are_as_documented(written: tuple[Path, TableFormat]) -> None:
    data, size = written[0].read_bytes(), row_bytes(COLUMNS, written[1])
    for number in (0, 1, 69, 70, 299):
        row = data[number * size : (number + 1) * size]
        assert int.from_bytes(row[-4:], "little") == mirror_word(row[:-4], number)


@pytest.mark.parametrize("threads", [1, 2])
def test_gathering_many_rows_is_gathering_each(written: tuple[Path, TableFormat], threads: int) -> None:
    pool.configure(threads)
    try:
        with open_table(written) as table:
            whole = table.read_rows(0, ROWS)
            ids = np.random.default_rng(1).integers(0, ROWS, (257, 3))
            assert torch.equal(table.gather(ids), whole[torch.from_numpy(ids)].reshape(257, -1))
            assert torch.equal(table.gather(ids[:1]), whole[torch.from_numpy(ids[:1])].reshape(1, -1))
            assert table.check(100) == ROWS * table.row_bytes
    finally:
        pool.configure(1)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_damaged_or_absent_row_is_named(written: tuple[Path, TableFormat], threads: int) -> None:
    path = written[0]
    size = row_bytes(COLUMNS, written[1])
    data = bytearray(path.read_bytes())
    data[201 * size + 3] ^= 0x10
    data[150 * size + size - 1] ^= 0x01
    path.write_bytes(data)
    every = np.arange(ROWS)[:, None]
    pool.configure(threads)
    try:
        with open_table(written) as table:
            with pytest.raises(CheckpointError, match="row 150 is damaged"):
                table.gather(every)
            with pytest.raises(CheckpointError, match="row 201 is damaged"):
                table.gather(every[::-1])
            with pytest.raises(CheckpointError, match="row 150 is damaged"):
                table.check()
            table.gather(every[:150])
        path.write_bytes(data[: 149 * size + 5])
        with open_table(written) as table, pytest.raises(CheckpointError, match="row 149 is past the end"):
            table.gather(every)
    finally:
        pool.configure(1)


def test_rows_that_changed_places_are_found(written: tuple[Path, TableFormat]) -> None:
    path, size = written[0], row_bytes(COLUMNS, written[1])
    data = path.read_bytes()
    path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    with open_table(written) as table, pytest.raises(CheckpointError, match="row 0 is damaged"):
        table.gather(np.array([[0]]))
