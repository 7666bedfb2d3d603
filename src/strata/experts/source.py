"""The experts as they lie in the model's files: opened once, read in pieces by the stager, mapped where asked.

Lives in ``experts`` because the file is a tier. What it needs of a pack is the protocol ``ExpertFile``; how a pack
is laid out it must not know.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.errors import CheckpointError, ConfigError, MemoryPlanError
from strata.files import open_regular
from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.stager import ReadFailure, Stager
from strata.kernels.cpu.synthetic import BlobRecipe
from strata.memory.system import system

__all__ = ["BlobPlace", "ExpertFile", "ExpertSource"]

CACHE_SAMPLES = 64


@dataclass(frozen=True)
class BlobPlace:
    """Bytes of one expert in a file. ``checksum`` is the 64-bit one of ``kernels.cpu.checksum``, or None.

    With a ``recipe`` there is no file: the bytes are computed where they would be read.
    """

    path: Path
    offset: int
    nbytes: int
    checksum: int | None
    recipe: BlobRecipe | None = None


class ExpertFile(Protocol):
    """What a pack tells of its routed experts. ``scales`` is FP32 [layers, experts, 3] (gate, up, down)."""

    num_layers: int
    num_experts: int
    blob_bytes: int
    scales: NDArray[np.float32]

    def place(self, layer: int, expert: int) -> BlobPlace: ...


class ExpertSource:
    """Reads blobs of an ``ExpertFile``. ``verify`` compares every read with its checksum (12 GB/s a thread).

    ``direct`` reads go past the page cache: on a drive of 1.7 GB/s they ran at 1.4-1.7 where reads through a cold cache
    ran at 0.3-1.0, and a warm cache gives 5. They need whole pages at both ends, else the cache is used all the same.
    """

    def __init__(self, file: ExpertFile, *, verify: bool = True) -> None:
        self.file = file
        self.num_layers, self.num_experts, self.blob_bytes = file.num_layers, file.num_experts, file.blob_bytes
        self.scales = np.ascontiguousarray(file.scales, np.float32)
        assert self.scales.shape == (self.num_layers, self.num_experts, 3), "one triple of scales an expert"
        self.direct = False
        self._verify = verify
        self._checked = np.zeros((self.num_layers, self.num_experts), np.bool_)  # of the mapped blobs
        self._descriptors: dict[tuple[Path, bool], int | None] = {}
        self._maps: dict[Path, system.FileMap] = {}

    def submit(self, stager: Stager, layer: int, expert: int, address: int) -> int:
        """Starts reading a blob to ``address``, which the caller keeps valid; the stager's ticket."""
        place = self._place(layer, expert)
        if place.recipe is not None:
            return stager.compute(place.recipe.fill, place.recipe.words, address, place.nbytes)
        expected = place.checksum if self._verify else None
        descriptor = None
        if self.direct and not (place.offset | place.nbytes | address) % system.PAGE_BYTES:
            descriptor = self._open(place.path, direct=True)
        if descriptor is None:
            descriptor = self._open(place.path, direct=False)
        assert descriptor is not None
        return stager.read(descriptor, place.offset, address, place.nbytes, expected)

    def cached_share(self, experts: Sequence[int]) -> float:
        """About how much of these experts (flat numbers) the page cache holds: a sample of their pages."""
        sample = experts[:: max(1, len(experts) // CACHE_SAMPLES)]
        found = 0
        for number in sample:
            place = self._place(*divmod(number, self.num_experts))
            if place.recipe is not None:
                return 1.0
            descriptor = self._open(place.path, direct=False)
            assert descriptor is not None
            found += system.is_cached(descriptor, place.offset + place.nbytes // 2)
        return found / len(sample) if sample else 1.0

    def explain(self, layer: int, expert: int, failure: ReadFailure) -> CheckpointError:
        """The named error of a read that failed."""
        place = self.file.place(layer, expert)
        what = f"expert {expert} of layer {layer} in {place.path.name} at byte {place.offset:,}"
        if failure.reason == "truncated":
            return CheckpointError(f"{what}: the file ends before its {place.nbytes:,} bytes", "fetch or pack it again")
        if failure.reason == "damaged":
            return CheckpointError(f"{what}: the bytes do not have their checksum", "fetch or pack it again")
        return CheckpointError(f"{what} cannot be read: {failure.reason}", "check the drive and the file's permissions")

    def check_mapped(self, layer: int, expert: int, address: int) -> None:
        """Compares a mapped blob with its checksum at its first touch: nobody copies it. Raises the named error."""
        if self._checked[layer, expert] or not self._verify:
            return
        place = self._place(layer, expert)
        if place.checksum is not None and checksum_at(address, place.nbytes) != place.checksum:
            raise self.explain(layer, expert, ReadFailure("damaged"))
        self._checked[layer, expert] = True

    def map_addresses(self) -> NDArray[np.uint64]:
        """[layers, experts] addresses in the mapped files, valid until ``close``."""
        addresses = np.zeros((self.num_layers, self.num_experts), np.uint64)
        for layer in range(self.num_layers):
            for expert in range(self.num_experts):
                place = self._place(layer, expert)
                if place.recipe is not None:
                    raise ConfigError("a computed model has no file to map", "leave --mmap-experts out")
                mapped = self._map(place.path)
                if place.offset + place.nbytes > mapped.nbytes:
                    raise self.explain(layer, expert, ReadFailure("truncated"))
                addresses[layer, expert] = mapped.address + place.offset
        return addresses

    def checksums(self) -> NDArray[np.uint64] | None:
        """Of every expert, flat; None where reads are not compared or a pack has none."""
        found = [self._place(*divmod(n, self.num_experts)).checksum for n in range(self.num_layers * self.num_experts)]
        if not self._verify or any(checksum is None for checksum in found):
            return None
        return np.array(found, np.uint64)

    def file_tables(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(descriptor, offset) of every expert, flat, for native reads; descriptors are valid until ``close``.

        -1 for one that is computed: it cannot be read in a round on a card.
        """
        places = [self._place(*divmod(n, self.num_experts)) for n in range(self.num_layers * self.num_experts)]
        descriptors = [-1 if place.recipe else self._open(place.path, direct=False) for place in places]
        return np.array(descriptors, np.int32), np.array([place.offset for place in places], np.int64)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()
        for mapped in self._maps.values():
            mapped.free()
        self._maps.clear()

    def _place(self, layer: int, expert: int) -> BlobPlace:
        place = self.file.place(layer, expert)
        assert place.nbytes == self.blob_bytes, "all blobs of a pack have one size"
        return place

    def _open(self, path: Path, *, direct: bool) -> int | None:
        """The file's descriptor, opened once; None where the file system has no direct reads."""
        if (path, direct) not in self._descriptors:
            self._descriptors[path, direct] = self._open_once(path, direct)
        return self._descriptors[path, direct]

    @staticmethod
    def _open_once(path: Path, direct: bool) -> int | None:
        try:
            if direct:
                return system.open_direct(path)
            return open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be opened: {error.strerror}", "restore the file") from error

    def _map(self, path: Path) -> system.FileMap:
        mapped = self._maps.get(path)
        if mapped is None:
            try:
                mapped = system.map_file(path)
            except MemoryError as error:
                raise MemoryPlanError(
                    f"the system refuses memory: {error}", "raise its limit (ulimit -v), or use another RAM mode"
                ) from error
            except OSError as error:
                raise CheckpointError(f"{path.name} cannot be mapped: {error.strerror}", "restore the file") from error
            self._maps[path] = mapped
        return mapped
