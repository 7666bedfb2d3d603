"""``strata rm NAME``: removes a model from STRATA_HOME, after asking.

Lives in ``cli``. The folder is renamed before anything in it is deleted, so an interrupted removal leaves nothing
that can be loaded; the next ``strata rm`` finishes it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.home_models import REMOVED_SUFFIX, folder_bytes, home_models, leftovers
from strata.errors import ConfigError
from strata.files import sync_folder
from strata.paths import find_home

LOCK_FILE = ".lock"  # of a pack that is being written


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model's name, as strata list shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Removes a model from STRATA_HOME."""
    for folder in leftovers():
        delete(folder)
    path = find_pack_to_remove(name)
    size = folder_bytes(path)
    if not (yes or confirm(f"remove {path} ({size:,} bytes)?")):
        print("nothing was removed")
        return 1
    remove(path)
    print(f"removed {name}: {size:,} bytes")
    return 0


def find_pack_to_remove(name: str) -> Path:
    """The folder. Raises ``ConfigError`` for what is not a pack directly in STRATA_HOME/models."""
    from strata.checkpoint.recognise import Kind, recognise

    models = find_home().models
    path = models / name
    if name != Path(name).name or name in (".", "..", ""):
        raise ConfigError(
            f"'{name}' is not a name in {models}", "only models there are removed; strata list names them"
        )
    if path not in home_models():
        there = ", ".join(one.name for one in home_models()) or "nothing"
        raise ConfigError(f"no model '{name}' in {models}", f"there is {there}")
    if path.is_symlink():
        raise ConfigError(f"{path} is a link to {path.resolve()}", "remove the link yourself; nothing was removed")
    found = recognise(path)
    if found.kind not in (Kind.PACK, Kind.UNFINISHED_PACK):
        raise ConfigError(f"{path} is {found.kind.value}, not a pack", "remove it yourself if you want it gone")
    if found.kind is Kind.UNFINISHED_PACK and is_written(path):
        raise ConfigError(f"{path} is being written by another strata process", "wait for it, or stop it")
    return path


def is_written(path: Path) -> bool:
    """Whether a pack writer holds the lock of an unfinished pack."""
    if not hasattr(os, "lockf"):
        return False
    try:
        with (path / LOCK_FILE).open("r+b") as lock:
            os.lockf(lock.fileno(), os.F_TEST, 0)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def confirm(question: str) -> bool:
    """Asks on the terminal. Raises ``ConfigError`` where nobody can answer."""
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked: standard input is no terminal", "give --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def remove(path: Path) -> None:
    """Renames, then deletes. Raises ``ConfigError`` where the system refuses."""
    doomed = path.with_name(path.name + REMOVED_SUFFIX)
    try:
        os.rename(path, doomed)
        sync_folder(path.parent)
    except OSError as error:
        raise refusal(path, error) from None
    delete(doomed)


def delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise refusal(folder, error) from None


def refusal(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be removed: {error.strerror}", "look at its owner and rights")
