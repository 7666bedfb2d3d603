"""A model's name to a folder: what is refused before a byte is packed, and what makes a pack out of date."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.recognise import recognise
from strata.engine.engine import Engine
from strata.engine.load_memory import LoadMemory, take_memory
from strata.engine.locate import locate, refusal
from strata.engine.models import open_model
from strata.errors import CheckpointError
from strata.experts.profile import PROFILE_FILE, ExpertProfile
from tests.patience import PATIENCE_S

WEIGHTS = {".safetensors", ".bin"}  # of a pack


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkpoint, and a STRATA_HOME without models."""
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    return Path(shutil.copytree(checkpoint, tmp_path / "mine"))


def made(own: Path) -> list[str]:
    return [path.name for path in (own.parent / "home" / "models").glob("*")]


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_tokenizer_that_is_not_read_leaves_no_pack_and_names_the_users_folder(own: Path, content: str | None) -> None:
    (own / "tokenizer.json").unlink()
    if content is not None:
        (own / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        open_model(str(own))
    assert caught.value.message.startswith(str(own))
    assert not made(own)


def test_a_new_chat_template_makes_a_new_pack(own: Path) -> None:
    open_model(str(own)).close()
    open_model(str(own)).close()
    assert len(made(own)) == 1
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}")
    opened = open_model(str(own))
    opened.close()
    assert len(made(own)) == 2
    assert opened.text.template is not None
    assert "messages[0].content" in opened.text.template.sources["default"]


@pytest.mark.parametrize("has_weights", [True, False])
def test_the_config_is_looked_at_first_and_named_by_its_path(own: Path, has_weights: bool) -> None:
    if not has_weights:
        for file in own.glob("*.safetensors"):
            file.unlink()
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["NovelForCausalLM"]}))
    with pytest.raises(CheckpointError) as caught:
        locate(str(own))
    assert caught.value.message == f"{own}/config.json: architecture NovelForCausalLM is not implemented"
    if not has_weights:
        assert refusal(recognise(own)).message == caught.value.message
        (own / "config.json").write_text(json.dumps(config))
        assert "has no *.safetensors" in refusal(recognise(own)).message
    (own / "config.json").write_text(json.dumps({**config, "use_sliding_window": True}))
    with pytest.raises(CheckpointError) as caught:
        locate(str(own))
    assert caught.value.message == f"{own}/config.json: use_sliding_window is true, which is not implemented"
    assert caught.value.hint == "use a checkpoint whose use_sliding_window is false"


def test_an_unknown_name_lists_five_models_at_most(own: Path) -> None:
    for number in range(7):
        (own.parent / "home" / "models" / f"m{number}").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no model 'absent'") as caught:
        locate("absent")
    assert caught.value.hint.endswith("STRATA_HOME has m0, m1, m2, m3, m4 and 2 more (strata list)")


def test_a_wrong_path_is_told_without_torch() -> None:
    code = (
        "import sys; from strata.cli.app import main\n"
        "for words in (['run', '/nowhere', 'x'], ['inspect', '/nowhere'], ['pack', '/nowhere', '/x']):\n"
        "    assert main(words) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, capture_output=True)


def test_a_config_that_says_fp8_over_plain_weights_changes_no_byte(own: Path) -> None:
    def pack_bytes() -> dict[str, bytes]:
        opened = open_model(str(own))
        opened.close()
        return {path.name: path.read_bytes() for path in opened.reader.folder.iterdir() if path.suffix in WEIGHTS}

    plain = pack_bytes()
    config = json.loads((own / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (own / "config.json").write_text(json.dumps(config))
    again = pack_bytes()
    assert len(made(own)) == 2
    assert len(plain) >= 2
    assert plain == again


def test_text_files_that_a_pack_does_not_list_are_not_read(own: Path) -> None:
    """They are no part of what was checked; a link or a pipe among them would be followed, or waited for."""
    first = open_model(str(own))
    first.close()
    pack = first.reader.folder
    assert first.text.template is not None
    (pack / "special_tokens_map.json").write_text('{"bos_token": "nowhere"}')
    (pack / "config.json").symlink_to(own / "config.json")
    if "chat_template.jinja" not in first.reader.manifest.tokenizer_files:
        (pack / "chat_template.jinja").write_text("never")
    again = open_model(str(pack))
    again.close()
    assert again.text.template is not None
    assert again.text.template.sources == first.text.template.sources
    assert again.text.end_ids == first.text.end_ids


@pytest.mark.parametrize("kind", ["of this pack", "of another pack", "of an older Strata", "absent"])
def test_a_load_takes_the_profile_of_its_own_pack_alone(
    own: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(own))
    opened.close()
    reader = opened.reader
    picks = np.zeros((len(reader.expert_layers), reader.num_experts), np.int64)
    picks[:, -1] = 9
    if kind == "of an older Strata":
        table = {"format": "strata-expert-profile-1", "rows": 10, "picks": picks.tolist()}
        (reader.folder / PROFILE_FILE).write_text(json.dumps(table))
    elif kind != "absent":
        ExpertProfile(10, picks).write(reader.folder, reader.digest if kind == "of this pack" else "0" * 64)
    taken: list[LoadMemory] = []

    def take(*arguments: Any) -> LoadMemory:
        taken.append(take_memory(*arguments))
        return taken[-1]

    monkeypatch.setattr("strata.engine.runtime.take_memory", take)
    Engine.load(str(reader.folder), threads=1, max_context=64).close()
    (memory,) = taken
    assert (memory.heat is not None) == (kind == "of this pack")
    lines = [record.getMessage() for record in caplog.records if PROFILE_FILE in record.getMessage()]
    assert len(lines) == (kind not in ("of this pack", "absent"))
