"""``strata pack``, ``export`` and ``inspect`` as a user types them, on a checkpoint of a real family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strata.checkpoint.manifest import read_manifest
from strata.checkpoint.random_model import write_random_pack
from strata.cli.app import main
from strata.experts.profile import PROFILE_FILE, ExpertProfile
from strata.models import find
from tests.checkpoint.signed_manifests import rewrite

Run = Callable[..., tuple[int, str, str]]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def random_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_pack(tmp_path_factory.mktemp("packs") / "tiny", CONFIG, find)


def test_export_then_pack_then_inspect(random_pack: Path, tmp_path: Path, run: Run) -> None:
    status, out, err = run("export", random_pack, tmp_path / "hf")
    assert (status, err) == (0, "")
    assert str(tmp_path / "hf") in out
    status, out, _ = run("inspect", tmp_path / "hf", "--check", "--json")
    assert status == 0
    about = json.loads(out)
    weights = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors"))
    assert (about["kind"], about["family"], about["experts"]["format"]) == ("checkpoint", "qwen3_moe", "plain")
    assert weights - 8192 < about["checked"] == about["bytes"] < weights
    words = ("--experts", "bf16", "--dense", "bf16")
    status, out, _ = run("pack", tmp_path / "hf", tmp_path / "pack", *words)
    assert status == 0
    assert "strata inspect" in out
    status, out, _ = run("inspect", tmp_path / "pack", "--check")
    assert status == 0
    assert "2 layers x 4, bf16" in out
    assert "all sound" in out
    # BF16 to BF16 and back loses nothing.
    assert run("export", tmp_path / "pack", tmp_path / "again")[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_export_takes_a_models_name_and_no_checkpoint(
    random_pack: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "mine").symlink_to(random_pack)
    assert run("export", "mine", tmp_path / "hf")[0] == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    status, _, err = run("export", tmp_path / "hf", tmp_path / "again")
    assert status == 2
    assert "is a checkpoint already" in err


def test_inspect_counts_weights_and_bytes(random_pack: Path, run: Run) -> None:
    status, out, _ = run("inspect", random_pack, "--json")
    about = json.loads(out)
    assert status == 0
    assert about["bytes"] == sum(file.stat().st_size for file in random_pack.iterdir())
    attention = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 2 * 16
    assert about["weights"] == 2 * 64 * 64 + 64 + 2 * (attention + 2 * 64 + 4 * 64 + 4 * 3 * 32 * 64)
    assert about["experts"]["bytes"] == 8 * about["experts"]["bytes_each"]


def test_inspect_check_finds_one_flipped_bit(random_pack: Path, tmp_path: Path, run: Run) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in random_pack.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = bytearray((copy / "experts-00000.bin").read_bytes())
    data[4096] ^= 1
    (copy / "experts-00000.bin").write_bytes(data)
    assert run("inspect", copy)[0] == 0
    status, out, err = run("inspect", copy, "--check")
    assert (status, out) == (2, "")
    assert "layer 0, expert 0 is damaged" in err


def test_inspect_check_reads_the_expert_profile_too(random_pack: Path, tmp_path: Path, run: Run) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in random_pack.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "expert-profile.json").write_text("{bad")
    status, out, err = run("inspect", copy, "--check")
    assert (status, out) == (2, "")
    assert "expert-profile.json is no expert profile" in err


def test_mistakes_are_one_line_and_status_two(random_pack: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    save_file({"a": torch.zeros(1)}, tmp_path / "alone.safetensors")
    cases = [
        (("pack", tmp_path / "m.gguf", tmp_path / "x"), "GGUF"),
        (("pack", tmp_path / "absent", tmp_path / "x"), "does not exist"),
        (("pack", random_pack, tmp_path / "x"), "Strata pack already"),
        (("pack", random_pack, tmp_path / "x", "--experts", "iq3"), "'iq3'"),
        (("pack", random_pack, tmp_path / "x", "--dense", "q4"), "'q4'"),
        (("export", tmp_path, tmp_path / "x"), "no config.json"),
        (("export", random_pack, random_pack), "exists already"),
        (("export", "no-such-model", tmp_path / "x"), "no-such-model"),
        (("inspect", tmp_path / "absent"), "does not exist"),
    ]
    for words, message in cases:
        status, out, err = run(*words)
        assert (status, out) == (2, ""), words
        assert message in err
        assert err.count("\n") <= 2
        assert not (tmp_path / "x").exists()


def copied(pack: Path, target: Path) -> Path:
    return Path(shutil.copytree(pack, target))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw["dense"]["norm.weight"].update(shape=[]), "norm.weight"),
        (lambda raw: raw["experts"].update(layers=[0, 2**63]), "experts.layers.1"),
        (lambda raw: raw.update(experts=None), "left over"),
        (lambda raw: raw["config"].update(num_experts_per_tok=2**64 - 1), "config: num_experts_per_tok"),
        (lambda raw: raw["experts"]["files"].__setitem__(0, "../experts-00000.bin"), "plain file name"),
    ],
)
def test_a_signed_manifest_of_no_sense_is_one_line_for_every_command(
    random_pack: Path, tmp_path: Path, run: Run, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    copy = copied(random_pack, tmp_path / "copy")
    shutil.copy(copy / "experts-00000.bin", tmp_path)
    rewrite(copy, change)
    commands: list[tuple[object, ...]] = [
        ("inspect", copy),
        ("inspect", copy, "--check"),
        ("export", copy, tmp_path / "hf"),
        ("plan", "--model", copy),
        ("run", "--model", copy, "text"),
    ]
    for command in commands:
        status, out, err = run(*command)
        assert (status, out) == (2, ""), command
        assert words in err, (command, err)
        assert "Traceback" not in err
        assert err.count("strata:") <= 1
    assert not (tmp_path / "hf").exists()


def test_inspect_names_links(random_pack: Path, tmp_path: Path, run: Run) -> None:
    copy = copied(random_pack, tmp_path / "copy")
    (copy / "experts-00000.bin").rename(tmp_path / "elsewhere.bin")
    (copy / "experts-00000.bin").symlink_to(tmp_path / "elsewhere.bin")
    status, out, _ = run("inspect", copy, "--check")
    assert status == 0
    assert f"link       experts-00000.bin -> {tmp_path / 'elsewhere.bin'}\n" in out
    assert json.loads(run("inspect", copy, "--json")[1])["links"] == {
        "experts-00000.bin": str(tmp_path / "elsewhere.bin")
    }


def test_inspect_check_refuses_the_profile_of_another_pack(random_pack: Path, tmp_path: Path, run: Run) -> None:
    """Of the same shape: the packs differ in their seed alone."""
    other = write_random_pack(tmp_path / "other", CONFIG, find, seed=1)
    copy = copied(random_pack, tmp_path / "copy")
    profile = ExpertProfile(10, np.full((2, 4), 5))
    for pack in (other, copy):
        profile.write(pack, read_manifest(pack).manifest_sha256)
        assert run("inspect", pack, "--check")[0] == 0
    shutil.copy(other / PROFILE_FILE, copy)
    status, out, err = run("inspect", copy, "--check")
    assert (status, out) == (2, "")
    assert f"{copy / PROFILE_FILE} was learned on another pack" in err
