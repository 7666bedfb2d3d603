"""From a model's name to a folder that can be opened or packed, or the one-line refusal of what is there.

Lives in ``engine`` beside ``models.py``, which opens what is found here. It never imports torch, so that a wrong path
is told at once: commands ask here before they load anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import strata
from strata.checkpoint.recognise import MANIFEST_FILE, Kind, Recognised, naming_config, recognise
from strata.errors import CheckpointError
from strata.files import read_regular
from strata.models import find
from strata.paths import find_home

__all__ = ["BUILT_IN_NAME", "SMALL_NAME", "Place", "locate", "refusal", "shipped_pack"]

SMALL_NAME = "small"
BUILT_IN_NAME = "built-in-random"
LISTED_MODELS = 5


@dataclass(frozen=True)
class Place:
    """``path`` is a pack's folder, or a checkpoint's that is to be packed; None stands for the model of random
    weights, which is made where it is missing."""

    path: Path | None
    name: str
    is_checkpoint: bool = False


def shipped_pack() -> Path | None:
    """The small trained model's folder in the package's own data; None where it was not installed."""
    folder = Path(strata.__file__).parent / "data" / SMALL_NAME
    return folder if (folder / MANIFEST_FILE).is_file() else None


def locate(name: str | None) -> Place:
    """Finds what ``name`` says; None is the built-in model. A path goes before a built-in name, and that before a name
    in STRATA_HOME. Raises ``CheckpointError`` in one line for what is not read, without reading a weight."""
    shipped = shipped_pack()
    random, trained = Place(None, BUILT_IN_NAME), Place(shipped, "the built-in model")
    if name is None:
        return random if shipped is None else trained
    found = recognise(name)
    if found.kind is Kind.ABSENT:
        if name == BUILT_IN_NAME:
            return random
        if name == SMALL_NAME and shipped is not None:
            return trained
        found = recognise(find_home().models / name)
        if found.kind is Kind.ABSENT:
            raise no_model(name)
    if found.kind not in (Kind.SAFETENSORS, Kind.PACK):
        raise refusal(found)
    if found.kind is Kind.SAFETENSORS:
        check_config(found)
    return Place(found.path, found.path.resolve().name, found.kind is Kind.SAFETENSORS)


def refusal(found: Recognised) -> CheckpointError:
    """Why what was found is not read: by its config where the weights are not there, else by what it is."""
    if found.kind is Kind.NO_WEIGHTS:
        try:
            check_config(found)
        except CheckpointError as error:
            return error
    return found.refuse()


def check_config(found: Recognised) -> None:
    """Raises ``CheckpointError`` for a config that no family reads: with or without its weights it will not run."""
    path = found.path / "config.json"
    if not path.is_file():
        return
    with naming_config(found.path):
        raw = json.loads(read_regular(path))  # an object, or it would not have been recognised
        find(raw).read_config(raw)


def no_model(name: str) -> CheckpointError:
    there = sorted(entry.name for entry in find_home().models.glob("*") if entry.is_dir())
    known = "STRATA_HOME has no model yet"
    if there:
        more = f" and {len(there) - LISTED_MODELS} more (strata list)" if len(there) > LISTED_MODELS else ""
        known = f"STRATA_HOME has {', '.join(there[:LISTED_MODELS])}{more}"
    return CheckpointError(
        f"no model '{name}': no such path, and no model of that name", f"give a pack or a checkpoint folder; {known}"
    )
