"""Packs of random weights, one of each family, in every part of the families: made from seeds alone, without an oracle.

For tests on a machine with nothing but the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata.checkpoint.pack_writer import PackOptions
from strata.checkpoint.random_model import write_random_pack
from strata.models import find
from strata.models.synthetic_shapes import synthetic_config
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer_files import tokenizer_files

__all__ = ["FAMILIES", "write_random_model"]

FAMILIES = {"qwen3_moe": "tiny-attention", "qwen4_exp": "tiny-hyper"}
LAYERS = {"qwen3_moe": 2, "qwen4_exp": 4}  # of qwen4_exp every fourth is one of attention
SMALL = {"num_experts": 16, "vocab_size": 272, "max_position_embeddings": 1024, "eos_token_id": [258, 256]}


def write_random_model(folder: Path, family: str, *, experts: Any = "nvfp4", seed: int = 3) -> Path:
    """A pack of ``family`` in ``folder``; returns it."""
    raw = synthetic_config(FAMILIES[family], LAYERS[family])
    text = raw.get("text_config", raw)
    text.update({name: value for name, value in SMALL.items() if name in text})
    words = folder / f"{family}-words"
    words.mkdir()
    byte_tokenizer(words)
    return write_random_pack(
        folder / f"{family}-{experts}", raw, find, PackOptions(experts=experts), seed=seed,
        tokenizer_files=tuple(tokenizer_files(words)),
    )  # fmt: skip
