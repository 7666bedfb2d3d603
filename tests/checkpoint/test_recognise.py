"""What a path is, told from a few bytes: every kind a user may point at, and its one-line refusal."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from strata.checkpoint.recognise import Kind, find_checkpoint, find_pack, recognise
from strata.errors import CheckpointError


def _folder(path: Path, files: dict[str, bytes | dict]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def _quantised(**config: object) -> dict[str, bytes | dict]:
    return {"config.json": {"model_type": "m", "quantization_config": config}, "model.safetensors": b"x"}


def _without_weights(**config: object) -> dict[str, bytes | dict]:
    return {"config.json": _quantised(**config)["config.json"]}


CASES: list[tuple[str, dict[str, bytes | dict], Kind, str]] = [
    ("gguf folder", {"model-Q4_0.gguf": b"GGUF\x03\0\0\0"}, Kind.GGUF, "GGUF"),
    ("gguf beside config", {"config.json": {}, "m.gguf": b"GGUF"}, Kind.GGUF, "GGUF"),
    ("ollama", {"blobs/sha256-ab": b"GGUF", "manifests/x": b"{}"}, Kind.OLLAMA, "Ollama"),
    ("ollama home", {"models/blobs/sha256-ab": b"GGUF", "models/manifests/x": b"{}"}, Kind.OLLAMA, "Ollama"),
    ("awq", _quantised(quant_method="awq", bits=4), Kind.QUANTISED, "AWQ"),
    ("gptq", _quantised(quant_method="gptq", bits=4), Kind.QUANTISED, "GPTQ"),
    ("bitsandbytes", _quantised(quant_method="bitsandbytes"), Kind.QUANTISED, "bitsandbytes"),
    ("unknown method", _quantised(quant_method="novel"), Kind.QUANTISED, "'novel'"),
    ("w4a16", _quantised(quant_method="compressed-tensors", format="pack-quantized"), Kind.QUANTISED, "pack-quantized"),
    ("modelopt int4", _quantised(quant_method="modelopt", quant_algo="W4A16_AWQ"), Kind.QUANTISED, "W4A16_AWQ"),
    (
        "mlx",
        {"config.json": {"quantization": {"group_size": 64, "bits": 4}}, "m.safetensors": b""},
        Kind.QUANTISED,
        "MLX",
    ),
    (
        "modelopt file",
        {"config.json": {}, "hf_quant_config.json": {"quantization": {"quant_algo": "INT8"}}, "m.safetensors": b""},
        Kind.QUANTISED,
        "INT8",
    ),
    (
        "foreign pack",
        {"manifest.json": {"format": "other", "version": 3}, "x.bin": b""},
        Kind.FOREIGN,
        "another engine",
    ),
    ("broken manifest", {"manifest.json": b"{"}, Kind.UNKNOWN, "not JSON"),
    ("mlc", {"mlc-chat-config.json": {}, "params_shard_0.bin": b""}, Kind.FOREIGN, "MLC"),
    ("onnx", {"model.onnx": b"", "config.json": {}}, Kind.FOREIGN, "ONNX"),
    ("pickle", {"config.json": {}, "pytorch_model.bin": b"PK"}, Kind.PICKLE, "pickle"),
    ("no config", {"model.safetensors": b""}, Kind.NO_CONFIG, "no config.json"),
    ("bad config", {"model.safetensors": b"", "config.json": b"[]"}, Kind.NO_CONFIG, "not a JSON object"),
    ("awq without weights", _without_weights(quant_method="awq"), Kind.QUANTISED, "AWQ"),
    ("fp8 without weights", _without_weights(quant_method="fp8"), Kind.QUANTISED, "FP8"),
    (
        "fp8 but for experts, without weights",
        _without_weights(quant_method="fp8", modules_to_not_convert=["model.layers.0.mlp.experts"]),
        Kind.NO_WEIGHTS,
        "no *.safetensors",
    ),
    ("mlx without weights", {"config.json": {"quantization": {"group_size": 64, "bits": 4}}}, Kind.QUANTISED, "MLX"),
    ("no weights", {"config.json": {}, "tokenizer.json": {}}, Kind.NO_WEIGHTS, "no *.safetensors"),
    ("cache", {"snapshots/0a1b/config.json": {}, "refs/main": b"0a1b"}, Kind.UNKNOWN, "snapshots/0a1b"),
    ("other folder", {"a.txt": b"", "b.txt": b""}, Kind.UNKNOWN, "a.txt, b.txt"),
    ("empty", {}, Kind.EMPTY, "empty folder"),
]


@pytest.mark.parametrize(("files", "kind", "word"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_folder_is_refused_in_one_line_that_says_what_is_read(
    tmp_path: Path, files: dict[str, bytes | dict], kind: Kind, word: str
) -> None:
    folder = _folder(tmp_path / "model", files)
    assert recognise(folder).kind is kind
    for find in (find_checkpoint, find_pack):
        with pytest.raises(CheckpointError) as error:
            find(folder)
        text = str(error.value)
        assert word in text
        assert str(folder) in text
        assert "\n" not in text
        assert error.value.hint
        assert error.value.exit_status == 2


@pytest.mark.parametrize(
    ("name", "start", "kind"),
    [
        ("m.gguf", b"GGUF\x03", Kind.GGUF),
        ("sha256-0123", b"GGUF\x03", Kind.OLLAMA),
        ("m.bin", b"ggml....", Kind.FOREIGN),
        ("pytorch_model.bin", b"PK\x03\x04", Kind.PICKLE),
        ("model.pt", b"\x80\x02}q", Kind.PICKLE),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", Kind.UNKNOWN),
        ("notes.txt", b"hello", Kind.UNKNOWN),
        ("nothing", b"", Kind.UNKNOWN),
    ],
)
def test_files(tmp_path: Path, name: str, start: bytes, kind: Kind) -> None:
    path = tmp_path / name
    path.write_bytes(start)
    assert recognise(path).kind is kind
    with pytest.raises(CheckpointError):
        find_checkpoint(path)


def test_a_single_shard_points_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="give its folder"):
        find_checkpoint(tmp_path / "model.safetensors")


def test_absent_path(tmp_path: Path) -> None:
    assert recognise(tmp_path / "no").kind is Kind.ABSENT
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "no")


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "mixed-precision"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "fp8"},
    ],
)
def test_quantised_checkpoints_that_the_tensors_decide_about(tmp_path: Path, quantisation: dict) -> None:
    folder = _folder(tmp_path / "model", _quantised(**quantisation))
    assert recognise(folder).kind is Kind.SAFETENSORS
    assert find_checkpoint(folder) == folder


def test_pack_and_checkpoint_are_told_apart(tmp_path: Path) -> None:
    pack = _folder(tmp_path / "pack", {"manifest.json": {"format": "strata-pack"}})
    checkpoint = _folder(tmp_path / "checkpoint", {"config.json": {}, "model.safetensors": b""})
    assert find_pack(pack) == pack
    assert find_checkpoint(checkpoint) == checkpoint
    with pytest.raises(CheckpointError, match="already"):
        find_checkpoint(pack)
    with pytest.raises(CheckpointError, match="strata pack"):
        find_pack(checkpoint)


def test_unfinished_pack(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "pack.unfinished", {"experts-00000.bin": b""})
    assert recognise(folder).kind is Kind.UNFINISHED_PACK


def test_a_pipe_or_a_device_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "x.safetensors").touch()
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="neither a folder nor a regular file"):
            find_checkpoint(path)
    assert recognise(tmp_path).kind is Kind.NO_CONFIG


def test_what_the_system_refuses_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: File name too long .*give the path of a folder"):
        recognise("x" * 5000)

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(CheckpointError, match=r"sealed cannot be read: Permission denied .*the right to read it"):
        recognise(tmp_path / "sealed")


@pytest.mark.parametrize("name", ["experts-00000.bin", "manifest.json", "dense.safetensors"])
def test_a_file_of_a_pack_names_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / name).touch()
    found = recognise(tmp_path / name)
    assert "is one file of a model" in str(found.refuse())
    assert str(tmp_path) in found.hint
