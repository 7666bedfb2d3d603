"""A tiny family that uses every feature of the weight map, checkpoints of it, and children to kill or to limit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from strata.checkpoint.weight_map import ExpertEntry, ExpertSource, WeightEntry, WeightMap

Tensors = dict[str, torch.Tensor]
EXPERTS, LAYERS, TABLE_ROWS, TABLE_COLUMNS = 4, 2, 37, 12


@dataclass(frozen=True)
class TinyConfig:
    hidden: int = 64
    intermediate: int = 48
    tied: bool = False
    vocabulary: int = 40
    orientation: str = "output_first"
    family: str = "tiny"


class TinyFamily:
    """Reads the keys of ``TinyConfig``; a prefix ``model.`` or ``model.text.`` is found."""

    def read_config(self, raw: Mapping[str, Any]) -> TinyConfig:
        known = {key: raw[key] for key in asdict(TinyConfig()) if key in raw}
        return replace(TinyConfig(), **known)

    def weight_map(self, config: TinyConfig) -> WeightMap:
        hidden = config.hidden
        prefixes = ("model.", "model.text.")

        def entry(name: str, shape: tuple[int, ...], kind: Any, role: Any, *parts: str, **more: Any) -> WeightEntry:
            sources = tuple(tuple(prefix + part for part in (parts or (name,))) for prefix in prefixes)
            return WeightEntry(name, shape, kind, role, sources, **more)

        dense = [
            entry("embed.weight", (config.vocabulary, hidden), "matrix", "embedding"),
            WeightEntry(
                "head.weight",
                (config.vocabulary, hidden),
                "matrix",
                "head",
                (("head.weight",),),
                tied_to="embed.weight" if config.tied else None,
            ),
            entry("table", (TABLE_ROWS, TABLE_COLUMNS), "table", "table", "t.0.weight", "t.1.weight", "t.2.weight"),
            entry("ids", (3,), "integers", "table", group="hash"),
            entry("draft.x", (5, hidden), "matrix", "dense", "draft.fc.weight", group="draft", columns=(0, hidden)),
            entry("draft.y", (5, 7), "matrix", "dense", "draft.fc.weight", group="draft", columns=(hidden, hidden + 7)),
        ]
        experts = []
        for layer in range(LAYERS):
            at = f"layers.{layer}."
            dense += [
                entry(at + "q.weight", (24, hidden), "matrix", "dense", at + "a.weight", at + "b.weight"),
                entry(at + "odd.weight", (5, 50), "matrix", "dense"),
                entry(at + "norm", (hidden,), "vector", "norm"),
                entry(at + "conv.weight", (10, 4), "conv", "norm"),
                entry(at + "gate.weight", (EXPERTS, hidden), "matrix", "router"),
                entry(at + "mix.weight", (6, hidden), "matrix", "hyper"),
            ]
            sources: list[ExpertSource] = []
            for prefix in prefixes:
                base = f"{prefix}{at}experts."
                one = base + "{expert}."
                sources += [
                    ExpertSource(one + "down.weight", one + "gate.weight", one + "up.weight"),
                    ExpertSource(one + "down.weight", gate_up=one + "gate_up.weight"),
                    ExpertSource(base + "down", gate_up=base + "gate_up", orientation=config.orientation),  # type: ignore[arg-type]
                    ExpertSource(base + "down", base + "gate", base + "up", orientation=config.orientation),  # type: ignore[arg-type]
                ]
            experts.append(ExpertEntry(layer, EXPERTS, hidden, config.intermediate, tuple(sources)))
        return WeightMap(tuple(dense), tuple(experts), ignored=("vision.",))


def tiny_tensors(config: TinyConfig = TinyConfig(), seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Per-expert tensors under ``model.``, with the optional groups."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden, config.intermediate

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {
        "model.embed.weight": draw(config.vocabulary, hidden),
        "model.ids": torch.tensor([2**40, -3, 5]),
        "model.draft.fc.weight": draw(5, hidden + 7),
        "vision.patch": draw(2, 3, 2, 2, 2),
    }
    if not config.tied:
        tensors["head.weight"] = draw(config.vocabulary, hidden)
    for part, rows in enumerate((10, 20, 7)):
        tensors[f"model.t.{part}.weight"] = draw(rows, TABLE_COLUMNS)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "a.weight": draw(8, hidden),
            at + "b.weight": draw(16, hidden),
            at + "odd.weight": draw(5, 50),
            at + "norm": draw(hidden),
            at + "conv.weight": draw(10, 1, 4),
            at + "gate.weight": draw(EXPERTS, hidden),
            at + "mix.weight": draw(6, hidden),
        }
        for expert in range(EXPERTS):
            one = f"{at}experts.{expert}."
            tensors |= {
                one + "gate.weight": draw(inner, hidden),
                one + "up.weight": draw(inner, hidden),
                one + "down.weight": draw(hidden, inner),
            }
    return tensors


def save_checkpoint(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None, shards: int = 1) -> Path:
    """A checkpoint folder of the tensors, in so many shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config or {})))
    names = list(tensors)
    if shards == 1:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name].clone().contiguous() for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def find_tiny(raw: Mapping[str, Any]) -> TinyFamily:
    """What ``strata.models.find`` is for real families."""
    return TinyFamily()


def in_child(body: Callable[[], None]) -> int:
    """Runs ``body`` in a forked child; its exit status, or minus the signal that ended it. 70: it raised."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - a child must never return into the test runner
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def memory_of_process(key: str) -> int:
    """A size in bytes of /proc/self/status: VmRSS, VmHWM (its peak), VmSize."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024
