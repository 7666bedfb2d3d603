"""Sizes of a trainer's model that a test computes in a moment."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocabulary": 256,
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "head_width": 16,
    "delta_key_heads": 2,
    "delta_value_heads": 4,
    "delta_width": 16,
    "experts": 8,
    "expert_width": 32,
    "shared_width": 32,
    "rank": 8,
    "ple_width": 64,
    "ngram_base": 128,
    "index_width": 16,
    "index_budget": 32,
    "context": 192,
    "eos": (250, 251),
}
