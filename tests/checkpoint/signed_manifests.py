"""Manifests changed as another program would have written them: with a right digest, by the format's own page."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ABSENT = object()
TOO_LARGE = "@too large"  # written as 1e400, which no library writes

ODD_VALUES: dict[str, Any] = {
    "null": None,
    "no text": "",
    "a long text": "x" * 100_000,
    "a path": "../manifest.json",
    "an escape": "\x1b[2J",
    "half a pair": "\ud800",
    "an empty list": [],
    "an empty object": {},
    "lists in lists": [[[[]]]],
    "-1": -1,
    "0": 0,
    "2**63": 2**63,
    "2**64-1": 2**64 - 1,
    "a hundred digits": 10**100,
    "1.0": 1.0,
    "1e400": TOO_LARGE,
    "nan": float("nan"),
    "true": True,
    "absent": ABSENT,
}

Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Of every value in a JSON document but the whole; of a list the first and the last."""
    if isinstance(value, dict):
        inside: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        inside = [(at, value[at]) for at in sorted({0, len(value) - 1}) if value]
    else:
        return
    for key, child in inside:
        yield (*at, key)
        yield from places(child, (*at, key))


def changed(raw: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """A copy with one value put in its place, or taken out."""
    result = copy.copy(raw)
    inside: Any = result
    for key in place[:-1]:
        inside[key] = copy.copy(inside[key])
        inside = inside[key]
    if value is ABSENT:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return result


def sign(folder: Path, raw: dict[str, Any]) -> None:
    """Writes ``raw`` as the manifest of ``folder``, with the digest that it must have."""
    sign_text(folder, json.dumps({**raw, "manifest_sha256": "0" * 64}))


def sign_text(folder: Path, text: str) -> None:
    text = text.replace(json.dumps(TOO_LARGE), "1e400")
    key = '"manifest_sha256": "'
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace(key + "0" * 64, key + digest))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest of ``folder`` in place."""
    raw = json.loads((folder / "manifest.json").read_bytes())
    change(raw)
    sign(folder, raw)
