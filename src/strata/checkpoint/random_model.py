"""Random weights of a family's shape, and a pack of them: a model to try the engine with when there is no download.

Lives in ``checkpoint`` as another source for the pack writer. Weights depend on the seed and their name alone, and are
scaled so that activations stay near one and logits have a spread of one or two. It must not know families.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from strata.checkpoint.pack_writer import PackOptions, Progress, write_pack
from strata.checkpoint.source_model import ExpertWeights
from strata.checkpoint.weight_map import ExpertEntry, WeightEntry, WeightMap
from strata.errors import CheckpointError

__all__ = ["RandomSource", "write_random_pack"]

# Spread of a role's weights, in units of 1 / sqrt(inputs). Twice that for router, embedding, and head makes picks and
# tokens clearly ranked; at one, thousands of logits lie too close for greedy tokens to survive any rounding.
_GAIN = {"router": 2.0, "embedding": 2.0, "head": 2.0}


class _Family(Protocol):
    def read_config(self, raw: Mapping[str, Any]) -> Any: ...
    def weight_map(self, config: Any) -> WeightMap: ...


class RandomSource:
    """A ``WeightSource`` of random weights. Optional groups named in ``without`` are left out, and those with integers
    that ``integers`` (by canonical name) does not give: hashes cannot be random."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weight_map: WeightMap,
        seed: int,
        *,
        without: frozenset[str] = frozenset(),
        integers: Mapping[str, torch.Tensor] | None = None,
        tokenizer_files: tuple[Path, ...] = (),
    ) -> None:
        self.name = f"random-{seed}"
        self.config = dict(config)
        self._integers = dict(integers or {})
        lacking = [entry for entry in weight_map.dense if entry.kind == "integers" and entry.name not in self._integers]
        needed = [entry.name for entry in lacking if entry.group is None]
        if needed:
            raise CheckpointError(f"a random model needs the values of {', '.join(needed)}")
        without = without | {entry.group for entry in lacking if entry.group is not None}
        self.absent_groups = without
        self.tokenizer_files = tokenizer_files
        self.entries = tuple(entry for entry in weight_map.dense if entry.group not in without)
        self.expert_entries = tuple(entry for entry in weight_map.experts if entry.group not in without)
        self._seed = seed
        self._by_name = {entry.name: entry for entry in self.entries}
        self._by_layer = {entry.layer: entry for entry in self.expert_entries}

    def parts(self, name: str) -> list[tuple[str, int]]:
        """The first alternative of the map; its parts share the rows evenly."""
        entry = self._by_name[name]
        if entry.tied_to:
            return []
        names = entry.sources[0]
        rows = entry.shape[0] if entry.shape else 1
        return [(part, rows * (at + 1) // len(names) - rows * at // len(names)) for at, part in enumerate(names)]

    def expert_names(self, layer: int) -> tuple[str, str, str]:
        """Names of the map's first alternative that has a tensor for each expert."""
        entry = self._by_layer[layer]
        source = next(one for one in entry.sources if one.gate and one.up and not one.packed)
        assert source.gate is not None
        assert source.up is not None
        return source.gate, source.up, source.down

    def source_dtype(self, name: str) -> str:
        """F32, or I64 for integers."""
        return "I64" if self._by_name[name].kind == "integers" else "F32"

    def read_rows(self, name: str, rows_at_once: int) -> Iterator[torch.Tensor]:
        """The rows of a weight; the same values whatever ``rows_at_once`` is."""
        entry = self._by_name[name]
        if entry.kind == "integers":
            yield self._integers[name].to(torch.int64).reshape(entry.shape)
            return
        generator = self._generator(name)
        rows = entry.shape[0] if entry.shape else 1
        for start in range(0, rows, rows_at_once):
            shape = (min(rows_at_once, rows - start), *entry.shape[1:]) if entry.shape else ()
            yield torch.from_numpy(np.asarray(self._draw(entry, generator, shape)))

    def has_row_scales(self, name: str) -> bool:
        """Never: nothing is FP8 here."""
        return False

    def read_fp8_rows(self, name: str, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Not called, as ``has_row_scales`` says."""
        raise AssertionError(name)

    def read_expert(self, layer: int, expert: int) -> ExpertWeights:
        """One expert in FP32."""
        entry: ExpertEntry = self._by_layer[layer]
        generator = self._generator(f"experts.{layer}.{expert}")

        def draw(rows: int, columns: int) -> torch.Tensor:
            values = generator.standard_normal((rows, columns), dtype=np.float32)
            return torch.from_numpy(values * np.float32(1 / math.sqrt(columns)))

        gate = draw(entry.intermediate, entry.hidden)
        up = draw(entry.intermediate, entry.hidden)
        return ExpertWeights(gate, up, draw(entry.hidden, entry.intermediate))

    def _draw(self, entry: WeightEntry, generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
        if entry.kind == "vector":
            # Norms are either w or 1 + w, which the map does not say: half to one keeps both in bounds.
            return np.float32(0.5) + np.float32(0.5) * generator.random(shape, dtype=np.float32)
        inputs = 1 if entry.kind == "table" else entry.shape[-1]
        spread = np.float32(_GAIN.get(entry.role, 1.0) / math.sqrt(inputs))
        return generator.standard_normal(shape, dtype=np.float32) * spread

    def _generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def write_random_pack(
    destination: str | Path,
    config: Mapping[str, Any],
    find_family: Callable[[Mapping[str, Any]], _Family],
    options: PackOptions = PackOptions(),
    *,
    seed: int = 0,
    without: frozenset[str] = frozenset(),
    integers: Mapping[str, torch.Tensor] | None = None,
    tokenizer_files: tuple[Path, ...] = (),
    progress: Progress | None = None,
) -> Path:
    """A pack of random weights of the raw ``config``; returns its folder. The same arguments give the same bytes."""
    family = find_family(config)
    checked = family.read_config(config)
    source = RandomSource(
        config,
        family.weight_map(checked),
        seed,
        without=without,
        integers=integers,
        tokenizer_files=tokenizer_files,
    )
    return write_pack(source, destination, str(checked.family), options, progress)
