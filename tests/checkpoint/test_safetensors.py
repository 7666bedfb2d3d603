"""The safetensors reader: right tensors from sound files, a named error from the others (faults 10, 11, 13, 22)."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from strata.checkpoint.safetensors_header import parse_header
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.errors import CheckpointError
from tests.checkpoint.tiny_family import in_child, memory_of_process

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(6, dtype=torch.float32).to(torch.bfloat16).reshape(2, 3),
    "c": torch.tensor(7.5, dtype=torch.float16),
    "d": torch.empty(0, 5),
    "e": torch.arange(8, dtype=torch.uint8).reshape(2, 2, 2),
    "f": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "g": torch.tensor([2**62, -1], dtype=torch.int64),
}


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_every_type_and_shape_reads_back(tmp_path: Path) -> None:
    with Checkpoint(write(tmp_path, {"model.safetensors": TENSORS})) as checkpoint:
        assert set(checkpoint.specs) == set(TENSORS)
        for name, expected in TENSORS.items():
            got = checkpoint.read(name)
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
        assert torch.equal(checkpoint.read("a", 1, 3), TENSORS["a"][1:3])
        assert checkpoint.read("a", 1, 1).shape == (0, 4)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_random_files_read_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.mktemp("random")
    tensors = {str(i): (torch.randn(shape) * 50).to(dtype) for i, shape in enumerate(shapes)}
    with Checkpoint(write(folder, {"model.safetensors": tensors})) as checkpoint:
        for name, expected in tensors.items():
            assert torch.equal(checkpoint.read(name), expected)


def test_truncation_at_twenty_offsets_names_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.safetensors": TENSORS})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    offsets = sorted({0, 1, 7, 8, 9, len(whole) - 1, len(whole) - 8} | {len(whole) * k // 14 for k in range(1, 14)})
    assert len(offsets) >= 20
    for offset in offsets:
        path.write_bytes(whole[:offset])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Checkpoint(folder)
    path.write_bytes(whole)
    Checkpoint(folder).close()
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes after its last tensor"):
        Checkpoint(folder)


def test_truncation_after_the_header_was_read(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.safetensors": TENSORS})
    with Checkpoint(folder) as checkpoint:
        path = folder / "model.safetensors"
        last = max(checkpoint.specs.values(), key=lambda spec: spec.offset)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=rf"tensor '{last.name}' is cut short"):
            checkpoint.read(last.name)


def entry(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


HEADERS: list[tuple[Any, str]] = [
    (entry(shape=[2**63]), "2\\^63-1"),
    (entry(shape=[2**64 - 1]), "2\\^63-1"),
    (entry(shape=[-2]), "shape"),
    (entry(shape=[2**62, 2**62]), "needs"),
    (entry(shape=[True, 2]), "shape"),
    (entry(shape=[2.0]), "shape"),
    (entry(shape="2"), "shape"),
    (entry(shape=[1, 1, 1, 1, 1, 1, 1, 1, 2]), "9 dimensions"),
    (entry(shape=[1, 1, 1, 1, 3]), "needs 12 bytes"),
    (entry(data_offsets=[0, 2**63]), "data_offsets"),
    (entry(data_offsets=[0, 2**64 - 1]), "data_offsets"),
    (entry(data_offsets=[-8, 0]), "data_offsets"),
    (entry(data_offsets=[8, 0]), "rising"),
    (entry(data_offsets=[0]), "data_offsets"),
    (entry(data_offsets=[0, 7]), "span 7"),
    (entry(data_offsets=[4, 12]), "gap"),
    (entry(shape=[4], data_offsets=[0, 16]), "cut short"),
    (entry(dtype="F33"), "unknown type 'F33'"),
    (entry(dtype=4), "unknown type"),
    (entry(alignment=0), "exactly dtype"),
    ({"t": []}, "exactly dtype"),
    ({"t": {"dtype": "F32"}}, "exactly dtype"),
    ([], "not a JSON object"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    ({"__metadata__": {"a": 1}, **entry()}, "__metadata__"),
    (json.dumps(entry())[:-1].encode() + b"," + json.dumps(entry())[1:].encode(), "twice"),
    ({**entry(), "u": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlaps"),
]


@pytest.mark.parametrize(("header", "message"), HEADERS)
def test_unsound_headers(tmp_path: Path, header: Any, message: str) -> None:
    path = raw(tmp_path / "t.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=message) as error:
        parse_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 10_000])
def test_unsound_header_lengths(tmp_path: Path, length: int) -> None:
    path = raw(tmp_path / "t.safetensors", entry(), b"\0" * 8, length)
    with pytest.raises(CheckpointError, match="header"):
        parse_header(path)


def test_an_exact_fit_and_an_unaligned_header_load(tmp_path: Path) -> None:
    text = json.dumps(entry()).encode()
    for pad in range(8):
        path = raw(tmp_path / "model.safetensors", text + b" " * pad, b"\0\0\x80\x3f\0\0\0\x40")
        (tmp_path / "config.json").write_text("{}")
        assert path.stat().st_size == 8 + len(text) + pad + 8
        with Checkpoint(tmp_path) as checkpoint:
            assert checkpoint.read("t").tolist() == [1.0, 2.0]


A, B = {"a": TENSORS["a"]}, {"b": TENSORS["b"]}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = {"a": ONE, "b": TWO}


def test_shards_with_and_without_index(tmp_path: Path) -> None:
    for index in (INDEX, None):
        folder = write(tmp_path / str(index is None), {ONE: A, TWO: B}, index)
        with Checkpoint(folder) as checkpoint:
            assert torch.equal(checkpoint.read("b"), TENSORS["b"])
            assert set(checkpoint.specs) == {"a", "b"}


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({ONE: A}, INDEX, f"missing files: {TWO}"),
        ({ONE: A, TWO: B, "old.safetensors": {"z": TENSORS["a"]}}, INDEX, "old.safetensors is not named"),
        ({ONE: A, TWO: B}, {"a": TWO, "b": ONE}, "is in model-00001"),
        ({ONE: A, TWO: B}, {**INDEX, "z": ONE}, "in no file: z"),
        ({ONE: A, TWO: {**B, "z": TENSORS["a"]}}, INDEX, "not in model.safetensors.index.json: z"),
        ({ONE: A}, None, f"1 of 2 shards are missing: {TWO}"),
        ({ONE: A, TWO: A}, None, "'a' is in"),
        ({ONE: A, TWO: B, "model-00001-of-00001.safetensors": {"z": TENSORS["a"]}}, None, "two sets"),
        ({ONE: A}, {"a": "../" + ONE}, "outside"),
    ],
)
def test_index_and_shards_that_disagree(
    tmp_path: Path, files: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(write(tmp_path, files, index))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, {ONE: A, TWO: B})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint(folder)


def test_memory_refused_is_called_memory(tmp_path: Path) -> None:
    """Fault 13: a child whose address space is limited says memory, not that the file is damaged."""
    path = tmp_path / "model.safetensors"
    count = 1 << 32
    raw(path, {"big": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 4 * count)  # sparse: takes no disk
    (tmp_path / "config.json").write_text("{}")
    said = tmp_path / "said"

    def body() -> None:
        limit = memory_of_process("VmSize") + (4 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(CheckpointError) as error:
            Checkpoint(tmp_path).read("big")
        said.write_text(str(error.value))

    assert in_child(body) == 0
    text = said.read_text()
    assert "memory" in text
    assert "not damaged" in text
    assert str(4 * count) in text


def test_a_hole_in_permissions_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, {"model.safetensors": TENSORS})

    def refuse(*_: object) -> Callable[..., Any]:
        raise PermissionError(13, "Permission denied")

    with Checkpoint(folder) as checkpoint:
        monkeypatch.setattr("os.open", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpoint.read("a")


@settings(max_examples=150, derandomize=True, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_mutated_header_loads_or_is_named(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    """Whatever bytes of the header change: a ``CheckpointError`` or tensors inside of the file, nothing else."""
    folder = write(tmp_path_factory.mktemp("mutated"), {"model.safetensors": TENSORS})
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for place, value in edits:
        data[place % header] = value
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError), Checkpoint(folder) as checkpoint:
        for name, spec in checkpoint.specs.items():
            assert 8 <= spec.offset <= spec.offset + spec.nbytes <= len(data)
            if spec.dtype in ("F32", "BF16", "U8"):
                checkpoint.read(name)
