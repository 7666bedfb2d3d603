"""A damaged blob in a mapped file is found at its first touch, wherever that is: in place, streamed, or into a slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.engine.engine import Engine
from strata.engine.models import open_model
from strata.errors import CheckpointError


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The built-in random model with one byte changed in every expert of its first layer."""
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))

    def make() -> str:
        model = open_model("built-in-random")
        reader = model.reader
        spots = [reader.expert_location(reader.expert_layers[0], expert) for expert in range(reader.num_experts)]
        model.close()
        for spot in spots:
            with spot.path.open("r+b") as file:
                file.seek(spot.offset + 1000)
                byte = file.read(1)
                file.seek(spot.offset + 1000)
                file.write(bytes([byte[0] ^ 1]))
        return str(reader.folder)

    return make


@pytest.mark.parametrize("options", [{"expert_cache": 0}, {"expert_cache": 48}, {"expert_cache": 2}])
@pytest.mark.parametrize("rows", [3, 100])
def test_damage_in_a_mapped_file_is_found(damaged: Callable[[], str], options: dict[str, int], rows: int) -> None:
    path = damaged()
    with (
        pytest.raises(CheckpointError, match="do not have their checksum"),
        Engine.load(path, mmap_experts=True, ram_gib=2, **options) as engine,
    ):
        "".join(engine.generate([65] * rows, max_tokens=2, ignore_eos=True))
