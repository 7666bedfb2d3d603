"""Model families: one file each, with the config check, the weight names and the block order.

Lives above ``layers``; only this room knows model names. ``find`` chooses the family of a checkpoint. Importing this
package imports neither torch nor any family.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from strata.errors import CheckpointError

if TYPE_CHECKING:
    from strata.models.family import Family

__all__ = ["ARCHITECTURES", "find"]

ARCHITECTURES: Mapping[str, str] = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
}
"""Architecture names of ``config.json`` and the file of this room that reads them."""


def find(raw: Mapping[str, Any]) -> Family:
    """The family module of a raw ``config.json``. Raises ``CheckpointError`` naming what is read instead."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            "config.json has no list of architectures", f"use a checkpoint of {' or '.join(ARCHITECTURES)}"
        )
    for name in names:
        if name in ARCHITECTURES:
            return cast("Family", importlib.import_module(f"strata.models.{ARCHITECTURES[name]}"))
    raise CheckpointError(
        f"config.json: architecture {', '.join(names)} is not implemented",
        f"use a checkpoint of {' or '.join(ARCHITECTURES)}",
    )
