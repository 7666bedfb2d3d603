"""The folders of models in STRATA_HOME, for commands that list and remove them.

Lives in ``cli`` because only commands do that. It must not know what is in a folder.
"""

from __future__ import annotations

from pathlib import Path

from strata.checkpoint.recognise import UNFINISHED_SUFFIX
from strata.errors import ConfigError
from strata.paths import find_home

__all__ = ["REMOVED_SUFFIX", "folder_bytes", "home_models", "leftovers"]

REMOVED_SUFFIX = ".removed" + UNFINISHED_SUFFIX
"""A folder that is being removed is called so first: no reader takes it, whole or not."""


def home_models() -> list[Path]:
    """Folders in STRATA_HOME/models by name, without what a removal left behind."""
    return [path for path in _folders() if not path.name.endswith(REMOVED_SUFFIX)]


def leftovers() -> list[Path]:
    """Folders whose removal was interrupted."""
    return [path for path in _folders() if path.name.endswith(REMOVED_SUFFIX)]


def _folders() -> list[Path]:
    models = find_home().models
    try:
        return sorted(path for path in models.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{models} cannot be read: {error.strerror}", "set STRATA_HOME to a folder of yours"
        ) from None


def folder_bytes(path: Path) -> int:
    """Bytes of the files below ``path``; links are not followed."""
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_symlink() and file.is_file())
