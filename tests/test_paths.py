"""STRATA_HOME: where it lies, and that it is made only when needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.errors import ConfigError
from strata.paths import Home, find_home


def test_where_home_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_home({"STRATA_HOME": str(tmp_path / "s"), "XDG_DATA_HOME": "/x"}).root == tmp_path / "s"
    assert find_home({"STRATA_HOME": "~/s"}).root == tmp_path / "s"
    assert find_home({"XDG_DATA_HOME": "/x"}).root == Path("/x/strata")
    for ignored in ({}, {"XDG_DATA_HOME": ""}, {"XDG_DATA_HOME": "relative"}):
        assert find_home(ignored).root == tmp_path / ".local" / "share" / "strata"
    with pytest.raises(ConfigError, match="set to nothing"):
        find_home({"STRATA_HOME": " "})


def test_folders_are_made_on_demand(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    for folder in (home.models, home.kernels, home.profiles, home.calibration, home.logs):
        assert not folder.exists()
        assert home.make(folder).is_dir()
    assert home.config_file.parent == home.root
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="STRATA_HOME"):
        Home(tmp_path / "file").make(tmp_path / "file" / "logs")


def test_where_a_models_file_lies(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert home.model_file(None) is None
    assert home.model_file("nowhere") is None
    (home.models / "named").mkdir(parents=True)
    assert home.model_file("named") == home.models / "named" / "strata.toml"
    assert home.model_file(str(tmp_path)) == tmp_path / "strata.toml"
    (tmp_path / "one.bin").write_bytes(b"")
    assert home.model_file(str(tmp_path / "one.bin")) == tmp_path / "one.bin.toml"
