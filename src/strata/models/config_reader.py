"""Reads a raw config strictly: what is absent, of the wrong kind or not implemented is a one-line error.

Lives in ``models`` because families share it; the names it is asked for are the families'. It must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from strata.errors import CheckpointError

__all__ = ["MAX_EPS", "MAX_LAYERS", "MAX_THETA", "ConfigReader"]

_ABSENT = object()
_LARGEST_NUMBER = 3.4e38  # of FP32
_PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "norm_type": "rmsnorm",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
}
_LARGEST = 1 << 31  # no size of a real model reaches it, and products of two stay in 64 bits
MAX_EPS, MAX_THETA = 0.1, 1e12  # of norms and of rotary positions: real ones are below 1e-4 and 1e8
MAX_LAYERS = 1024  # ten times those of the deepest released model; each has lists of its own


class ConfigReader:
    """Typed access to one mapping of a ``config.json``; ``where`` names it in errors."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self._raw = raw
        self._where = where

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self._raw.get(key) is not None

    def value(self, *keys: str, default: Any = _ABSENT) -> Any:
        """The first of ``keys`` that is there and not null."""
        for key in keys:
            if self.has(key):
                return self._raw[key]
        if default is _ABSENT:
            raise self.refusal(f"{' or '.join(keys)} is missing")
        return default

    def integer(self, *keys: str, default: Any = _ABSENT, least: int = 1, most: int = _LARGEST - 1) -> int:
        """An integer in [least, most]."""
        found = self.value(*keys, default=default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            bounds = f"of at least {least}" + ("" if most == _LARGEST - 1 else f" and at most {most}")
            raise self.refusal(f"{keys[0]} is {_shown(found)}, an integer {bounds} is expected")
        return found

    def number(self, *keys: str, default: Any = _ABSENT, most: float = _LARGEST_NUMBER) -> float:
        """A number above zero, at most ``most``."""
        found = self.value(*keys, default=default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= most:
            bounds = "" if most == _LARGEST_NUMBER else f" of at most {most:g}"
            raise self.refusal(f"{keys[0]} is {_shown(found)}, a positive number{bounds} is expected")
        return float(found)

    def flag(self, key: str, *, default: Any = _ABSENT) -> bool:
        found = self.value(key, default=default)
        if not isinstance(found, bool):
            raise self.refusal(f"{key} is {_shown(found)}, true or false is expected")
        return found

    def choice(self, key: str, allowed: Collection[str], *, default: Any = _ABSENT) -> str:
        """A string out of ``allowed``; anything else is not implemented."""
        found = self.value(key, default=default)
        if not isinstance(found, str) or found not in allowed:
            raise self._not_implemented(key, found, *sorted(allowed))
        return found

    def require(self, key: str, expected: Any, *, default: Any = _ABSENT) -> None:
        """Refuses any other value than ``expected``. Without a default the key's absence counts as ``expected``."""
        found = self.value(key, default=expected if default is _ABSENT else default)
        if found != expected or isinstance(found, bool) != isinstance(expected, bool):
            raise self._not_implemented(key, found, expected)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one integer or a list; empty when absent."""
        found = self.value(key, default=[])
        listed = found if isinstance(found, list) else [found]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _LARGEST for i in listed):
            raise self.refusal(f"{key} is {_shown(found)}, token ids are expected")
        return tuple(listed)

    def nested(self, key: str) -> ConfigReader:
        found = self.value(key)
        if not isinstance(found, Mapping):
            raise self.refusal(f"{key} is {_shown(found)}, an object is expected")
        return ConfigReader(found, f"{self._where} {key}")

    def rope(self) -> ConfigReader:
        """The rotary parameters in either notation: one object, or ``rope_theta`` with ``rope_scaling`` beside it."""
        name = "rope_parameters" if self.has("rope_parameters") else "rope_scaling"
        inside = self.value(name, default={})
        if not isinstance(inside, Mapping):
            raise self.refusal(f"{name} is {_shown(inside)}, an object is expected")
        beside = {key: self._raw[key] for key in ("rope_theta", "partial_rotary_factor") if self.has(key)}
        reader = ConfigReader({**beside, **inside}, f"{self._where} {name}")
        kind = reader.value("rope_type", "type", default="default")
        if kind not in ("default", "mrope"):
            raise self.refusal(
                f"rope type {_shown(kind)} is not implemented", "use a checkpoint whose rope type is 'default'"
            )
        return reader

    def refuse_foreign_arithmetic(self) -> None:
        """Keys by which other models differ in norms, routing or logits, at any value but the plain one."""
        for key, plain in _PLAIN.items():
            self.require(key, plain)

    def _not_implemented(self, key: str, found: Any, *allowed: Any) -> CheckpointError:
        return self.refusal(
            f"{key} is {_as_json(found)}, which is not implemented",
            f"use a checkpoint whose {key} is {' or '.join(map(_as_json, allowed))}",
        )

    def refusal(self, what: str, hint: str = "") -> CheckpointError:
        return CheckpointError(f"{self._where}: {what}", hint)


def _as_json(value: Any) -> str:
    """As the file writes it: true, not True; cut where it is long."""
    return _cut(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:150]}... ({len(text):,} characters)"
