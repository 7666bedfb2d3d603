"""STRATA_HOME: where models, compiled kernels, profiles, calibration, logs and config.toml of a user lie.

Lives on top because the command line and several rooms keep files there. Knows names of folders and nothing of what
is in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strata.errors import ConfigError

__all__ = ["Home", "expanded", "find_home", "refuse_foreign_bytes"]


@dataclass(frozen=True)
class Home:
    """The folders below one root. Nothing is created until ``make`` is called for a folder."""

    root: Path

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def kernels(self) -> Path:
        return self.root / "kernels"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    @property
    def calibration(self) -> Path:
        return self.root / "calibration"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def config_file(self) -> Path:
        return self.root / "config.toml"

    def make(self, folder: Path) -> Path:
        """Creates a folder of this home and returns it. Raises ConfigError where that is not allowed."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be created: {error.strerror}", "set STRATA_HOME to a folder that you can write"
            ) from None
        return folder

    def model_file(self, model: str | None) -> Path | None:
        """The strata.toml of a model given by folder, file or name; None where no model is named.

        The file need not exist. Beside a model that is one file, it is ``<file>.toml``.
        """
        if model is None:
            return None
        for candidate in (expanded(model), self.models / model):
            if candidate.is_dir():
                return candidate / "strata.toml"
            if candidate.is_file():
                return candidate.with_name(candidate.name + ".toml")
        return None


def expanded(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~NAME`` as that home folder. Raises ConfigError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no home folder of that name", "give the path in full") from None


def find_home(environment: Mapping[str, str] | None = None) -> Home:
    """STRATA_HOME, else ``strata`` in the XDG data folder (a relative XDG_DATA_HOME is ignored, as XDG says)."""
    names = os.environ if environment is None else environment
    if "STRATA_HOME" in names:
        if not names["STRATA_HOME"].strip():
            raise ConfigError("STRATA_HOME is set to nothing", "name a folder, or unset it")
        refuse_foreign_bytes("STRATA_HOME", names["STRATA_HOME"])
        return Home(expanded(names["STRATA_HOME"]).absolute())
    data = Path(names.get("XDG_DATA_HOME") or "")
    if not data.is_absolute():
        try:
            data = Path.home() / ".local" / "share"
        except RuntimeError:
            raise ConfigError(
                "there is no home folder: HOME is not set, and the system knows none of this user",
                "set STRATA_HOME to a folder that you can write",
            ) from None
    return Home(data / "strata")


def refuse_foreign_bytes(what: str, text: str) -> None:
    """Raises ConfigError for text from the system that was not UTF-8: Python keeps such bytes as half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("utf-8", "backslashreplace")
        raise ConfigError(
            f"{what}: '{shown}' is not UTF-8 text", "give it in UTF-8; a file of such a name can be renamed"
        ) from None
