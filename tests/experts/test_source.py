"""Reads of blobs: past the page cache where that works, through it where it does not, mapped, and their errors."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from strata.errors import CheckpointError
from strata.experts.source import ExpertSource
from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.cpu.stager import Stager
from strata.memory import linux
from strata.memory.system import system
from tests.experts.small_model import SmallPack, write_pack

Small = tuple[SmallPack, ExpertKernel]


def read_all(source: ExpertSource, pack: SmallPack) -> None:
    stager = Stager(2)
    region = system.map_region(pack.blob_bytes)
    for layer in range(pack.num_layers):
        for expert in range(pack.num_experts):
            stager.wait(source.submit(stager, layer, expert, region.address))
            assert checksum_at(region.address, pack.blob_bytes) == int(pack.checksums[layer, expert])
    stager.close()
    region.free()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("whole_pages", [False, True])
def test_reads_give_the_blobs(tmp_path: Path, direct: bool, whole_pages: bool) -> None:
    pack, _ = write_pack(tmp_path, whole_pages=whole_pages)
    source = ExpertSource(pack)
    source.direct = direct
    read_all(source, pack)
    source.close()


def test_a_file_system_without_direct_reads_is_read_the_usual_way(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "open_direct", lambda path: None)
    source = ExpertSource(small[0])
    source.direct = True
    read_all(source, small[0])
    source.close()


def test_the_cached_share_follows_the_page_cache(small: Small) -> None:
    pack, _ = small
    source = ExpertSource(pack)
    pack.path.read_bytes()
    assert source.cached_share(range(24)) == 1.0
    descriptor = os.open(pack.path, os.O_RDONLY)
    os.fsync(descriptor)
    linux.drop_file_cache(descriptor)
    os.close(descriptor)
    assert 0.0 <= source.cached_share(range(24)) <= 1.0  # a file system in RAM drops nothing
    assert source.cached_share([]) == 1.0
    source.close()


def test_mapped_addresses_hold_the_blobs(small: Small) -> None:
    pack, _ = small
    source = ExpertSource(pack)
    addresses = source.map_addresses()
    sums = [checksum_at(int(address), pack.blob_bytes) for address in addresses.ravel()]
    assert (np.array(sums, np.uint64) == pack.checksums.ravel()).all()
    source.close()


def test_a_missing_file_is_a_named_error(small: Small, tmp_path: Path) -> None:
    pack, _ = write_pack(tmp_path, seed=3)
    pack.path.unlink()
    source = ExpertSource(pack)
    stager = Stager(1)
    for direct in (False, True):
        source.direct = direct
        with pytest.raises(CheckpointError, match=r"experts-3-12288\.bin cannot be opened: No such file"):
            source.submit(stager, 0, 0, 4096)
    with pytest.raises(CheckpointError, match="cannot be mapped: No such file"):
        source.map_addresses()
    stager.close()
    source.close()
