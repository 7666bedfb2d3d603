"""Saves and loads the trainer's weights under their published names, and its whole state.

Lives beside the trainer. ``export`` writes what any reader of the family takes: BF16 safetensors in files of at most
15 MB, an index, config.json. Knows names and files only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from model import Config, TrainModel
from safetensors import safe_open
from safetensors.torch import save_file

__all__ = ["export", "import_weights", "published_name"]

FILE_BYTES = 15_000_000


def published_name(name: str) -> str:
    """The checkpoint's name of a parameter."""
    if name.startswith(("mtp.", "lm_head.")):
        return name
    name = name.replace("ngram_embedding.weight", "ngram_embedding.shard_0.weight")
    return "model.language_model." + name


def export(model: TrainModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Writes the checkpoint; returns {file name: sha256}."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, p in model.named_parameters():
        tensor = p.detach().to("cpu", dtype).contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        if size + nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][published_name(name)] = tensor
        size += nbytes
    hashes, index = {}, {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        hashes[file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        index |= dict.fromkeys(tensors, file)
    total = sum(t.numel() * t.element_size() for part in files for t in part.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n")
    (folder / "config.json").write_text(json.dumps(model.c.hf_config(), indent=1) + "\n")
    return hashes


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@torch.no_grad()
def import_weights(model: TrainModel, folder: Path) -> None:
    """Loads a checkpoint of ``export``, or one that ``strata export`` made of a pack: there each expert has matrices
    of its own. A missing tensor is an error."""
    tensors = read_tensors(folder)
    for name, p in model.named_parameters():
        published = published_name(name)
        p.copy_(tensors[published] if published in tensors else _joined(tensors, published, len(p)))


def _joined(tensors: dict[str, torch.Tensor], published: str, count: int) -> torch.Tensor:
    """The experts' matrices one on another: ``...experts.gate_up_proj`` of ``...experts.0.gate_proj.weight`` ..."""
    prefix, _, kind = published.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return torch.stack([torch.cat([tensors[f"{prefix}.{i}.{part}.weight"] for part in parts]) for i in range(count)])


def config_of(meta: dict[str, Any]) -> Config:
    """The shipped sizes with the token ids of meta.json."""
    special = meta["special"]
    vision = {
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
    }
    return Config(eos=(special["<|endoftext|>"], special["<|im_end|>"]), extra=vision)
