"""What a request may ask of the sampler and of an answer's end, checked field by field.

One frozen object that server, CLI and engine share, so that a bound is written once. Every refusal names the field,
the value and the allowed range. It must not know logits; ``sampler.py`` gives the fields their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from strata.errors import RequestError

__all__ = ["MAX_STOPS", "MAX_TOP_LOGPROBS", "SamplingParams"]

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
_MAX_BIASES = 1024
_MAX_STOP_CHARS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one answer are chosen, and when it ends.

    ``temperature`` 0 is greedy: every filter is then without effect, penalties and biases are not. ``top_k`` 0,
    ``top_p`` 1, ``min_p`` 0, penalties 0 (``repetition_penalty`` 1) are off. ``logprobs`` is None for none, else
    how many alternatives to report beside the chosen token. ``seed`` None takes a fresh one. ``max_tokens`` None
    runs to the end of the context. ``ignore_eos`` and ``min_tokens`` keep the answer's end ids from being chosen.
    Raises RequestError (400).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._set("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        # -1 is how some clients write "off".
        self._set("top_k", _integer("top_k", 0 if self.top_k == -1 else self.top_k, 0, 1 << 31))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("seed", None if self.seed is None else _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1))
        self._set("logprobs", _optional("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS))
        self._set("max_tokens", _optional("max_tokens", self.max_tokens, 1, 1 << 31))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, 1 << 31))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")

    @classmethod
    def from_request(cls, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Parameters a client wrote over a checkpoint's recommendations; None in ``given`` means not written.

        A recommendation that is out of range here is the file's fault, and is refused the same way.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise RequestError(f"{unknown[0]}: not a sampling parameter", f"known: {', '.join(sorted(known))}")
        chosen = {name: value for name, value in (defaults or {}).items() if name in known}
        chosen.update({name: value for name, value in given.items() if value is not None})
        return cls(**chosen)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _refused(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}: {value!r} is not allowed", f"allowed: {allowed}")


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refused(name, value, f"a number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise _refused(name, value, f"{low:g} to {high:g}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(name, value, f"a whole number from {low} to {high}")
    if not low <= value <= high:
        raise _refused(name, value, f"{low} to {high}")
    return value


def _optional(name: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _biases(value: object) -> dict[int, float]:
    """Keys may be strings of digits: JSON has no other."""
    if not isinstance(value, Mapping):
        raise _refused("logit_bias", value, "an object of token id to bias")
    if len(value) > _MAX_BIASES:
        raise RequestError(f"logit_bias: {len(value)} entries", f"allowed: at most {_MAX_BIASES}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12
        id_ = int(key) if digits else key
        biases[_integer("logit_bias", id_, 0, 1 << 31)] = _number(f"logit_bias[{key}]", bias, -100.0, 100.0)
    return biases


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple):
        raise _refused("stop", value, "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: {len(stops)} strings", f"allowed: at most {MAX_STOPS}")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _MAX_STOP_CHARS:
            shown = stop if not isinstance(stop, str) or len(stop) < 40 else f"{stop[:40]}..."
            raise _refused("stop", shown, f"strings of 1 to {_MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _refused("stop_token_ids", value, "a list of token ids")
    return tuple(dict.fromkeys(_integer("stop_token_ids", id_, 0, 1 << 31) for id_ in value))
