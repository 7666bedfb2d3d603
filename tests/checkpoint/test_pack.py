"""Packs: what comes out went in, any changed byte is found, and there is never half a pack (faults 8, 10, 12)."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.checkpoint import dense_writer, pack_writer
from strata.checkpoint import manifest as manifest_module
from strata.checkpoint.manifest import encode_manifest, read_manifest
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.checkpoint.recognise import Kind, recognise
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.checkpoint.source_model import SourceModel
from strata.checkpoint.table_rows import TableFile
from strata.errors import CheckpointError, ConfigError
from strata.kernels.cpu.checksum import checksum
from strata.kernels.ops import Matrix
from strata.quant.blocks import dequantise, quantise
from tests.checkpoint.test_source_model import fuse, nvfp4_tensors
from tests.checkpoint.tiny_family import (
    EXPERTS,
    LAYERS,
    TABLE_COLUMNS,
    TABLE_ROWS,
    TinyConfig,
    TinyFamily,
    find_tiny,
    in_child,
    memory_of_process,
    save_checkpoint,
    tiny_tensors,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("source") / "tiny", tiny_tensors(), asdict(TinyConfig()))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "README.md").write_text("not packed")
    return folder


@pytest.fixture(scope="module")
def pack(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = PackOptions(expert_file_bytes=3 * 8192)
    return pack_checkpoint(source, tmp_path_factory.mktemp("packs") / "pack", find_tiny, options)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("dense", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("experts", ["nvfp4", "q8_0", "bf16"])
def test_weights_come_back_in_their_formats(source: Path, tmp_path: Path, dense: str, experts: str) -> None:
    options = PackOptions(experts=experts, dense=dense, hyper="f32")  # type: ignore[arg-type]
    path = pack_checkpoint(source, tmp_path / "pack", find_tiny, options)
    with PackReader(path) as reader, Checkpoint(source) as checkpoint:
        model = SourceModel(checkpoint, TinyFamily().weight_map(TinyConfig()))
        weights = reader.load_dense()
        assert set(weights) == {entry.name for entry in model.entries}
        assert reader.family == "tiny"
        assert reader.config == asdict(TinyConfig())
        for entry in model.entries:
            got, expected = weights[entry.name], model.read_dense(entry.name)
            if entry.kind == "integers":
                assert torch.equal(got, expected)  # type: ignore[arg-type]
            elif entry.kind in ("vector", "conv"):
                assert isinstance(got, torch.Tensor)
                assert got.dtype == torch.float32
                assert torch.equal(got, expected.float())
            elif entry.kind == "matrix":
                assert isinstance(got, Matrix)
                format = {"router": "f32", "hyper": "f32"}.get(entry.role, dense)
                assert (got.format, got.rows, got.columns) == (format, *entry.shape)
                assert_matrix(got, expected)
        assert reader.check() == sum(file.stat().st_size for file in path.iterdir())
        for layer in reader.expert_layers:
            for expert in range(EXPERTS):
                blob, scales = reader.read_expert(layer, expert)
                assert reader.layout is not None
                parts = reader.layout.dequantise(blob[None], scales[None])
                original = model.read_expert(layer, expert)
                for got, name in zip(parts, ("gate", "up", "down"), strict=True):
                    assert torch.equal(got[0], dequantise(quantise(getattr(original, name), reader.layout.format)))


def assert_matrix(got: Matrix, expected: torch.Tensor) -> None:
    if got.format != "q8_0":
        assert torch.equal(got.data, expected.to(got.data.dtype))
        return
    assert got.data.dtype == torch.int8
    assert got.data.shape[1] % 32 == 0
    assert (got.data[:, got.columns :] == 0).all()
    assert got.scales is not None
    assert got.scales.shape == (got.rows, got.data.shape[1] // 32)
    values = (got.data.float() * got.scales.float().repeat_interleave(32, 1))[:, : got.columns]
    step = expected.float().abs().amax(1, keepdim=True) / 127
    assert ((values - expected.float()).abs() <= 0.51 * step + 1e-6).all()


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
def test_nvfp4_experts_are_repacked_without_loss(tmp_path: Path, style: str) -> None:
    tensors, expected = nvfp4_tensors(style)
    folder = save_checkpoint(tmp_path / "source", tensors)
    with PackReader(pack_checkpoint(folder, tmp_path / "pack", find_tiny)) as reader:
        assert reader.layout is not None
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                blob, scales = reader.read_expert(layer, expert)
                parts = reader.layout.dequantise(blob[None], scales[None])
                for got, name in zip(parts, ("gate", "up", "down"), strict=True):
                    assert torch.equal(got[0], expected[f"model.layers.{layer}.experts.{expert}.{name}"])


@pytest.mark.parametrize("layout", ["fused", "packed", "packed_fused"])
def test_a_fused_tensor_larger_than_what_is_read_at_once(
    source: Path, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 8: one tensor holds all experts of a layer, and a buffer holds less than one expert."""
    config = TinyConfig()
    expected = read_all(pack_checkpoint(source, tmp_path / "plain", find_tiny))
    fused = fuse(tiny_tensors(config), layout, config)
    folder = save_checkpoint(tmp_path / "source", fused, asdict(config))
    monkeypatch.setattr(pack_writer, "SLICE_BYTES", 64)
    monkeypatch.setattr(dense_writer, "SLICE_BYTES", 64)
    found = read_all(pack_checkpoint(folder, tmp_path / "pack", find_tiny))
    assert max(tensor.nbytes for name, tensor in fused.items() if ".experts." in name) > 64
    weights = [name for name in expected if name.endswith((".bin", ".safetensors", ".rows"))]
    assert weights
    assert [name for name in weights if found[name] != expected[name]] == []


def test_locations_are_pages_of_files_with_checksums(pack: Path) -> None:
    with PackReader(pack) as reader:
        assert reader.layout is not None
        seen = set()
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                where = reader.expert_location(layer, expert)
                seen.add((where.path, where.offset))
                assert where.nbytes == reader.layout.blob_bytes
                assert where.offset % 4096 == 0
                with where.path.open("rb") as file:
                    file.seek(where.offset)
                    assert checksum(file.read(where.nbytes)) == where.checksum
        assert len(seen) == LAYERS * EXPERTS
        assert len({path for path, _ in seen}) > 1
        assert reader.tensor_scales.shape == (LAYERS, EXPERTS, 3)
        assert reader.tensor_scales.dtype == torch.float32
        assert reader.dense_bytes == sum(reader.matrix_bytes(name) for name in reader.manifest.dense)


def test_tokenizer_files_travel_and_others_do_not(pack: Path, source: Path) -> None:
    assert (pack / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (pack / "chat_template.jinja").exists()
    assert not (pack / "README.md").exists()


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    config = TinyConfig(tied=True)
    folder = save_checkpoint(tmp_path / "source", tiny_tensors(config), asdict(config))
    with PackReader(pack_checkpoint(folder, tmp_path / "pack", find_tiny)) as reader:
        weights = reader.load_dense()
        assert weights["head.weight"] is weights["embed.weight"]
        assert reader.matrix_bytes("head.weight") == 0


@pytest.mark.parametrize("format", ["f32", "bf16", "q8_0", "fp8"])
def test_tables_gather_their_rows(tmp_path: Path, format: str) -> None:
    tensors = tiny_tensors()
    if format == "fp8":
        for part in range(3):
            codes = tensors[f"model.t.{part}.weight"].float().clamp(-4, 4).to(torch.float8_e4m3fn)
            tensors[f"model.t.{part}.weight"] = codes
            scale = torch.tensor(0.5 + part) if part else torch.linspace(0.1, 1, 10).reshape(10, 1)
            tensors[f"model.t.{part}.weight_scale"] = scale
    folder = save_checkpoint(tmp_path / "source", tensors)
    options = PackOptions(dense="q8_0" if format == "fp8" else format)  # type: ignore[arg-type]
    path = pack_checkpoint(folder, tmp_path / "pack", find_tiny, options)
    with PackReader(path) as reader, Checkpoint(folder) as checkpoint:
        whole = SourceModel(checkpoint, TinyFamily().weight_map(TinyConfig())).read_dense("table").float()
        table = reader.load_dense()["table"]
        assert isinstance(table, TableFile)
        assert table.format == {"fp8": "f8_e4m3"}.get(format, format)
        ids = np.array([[0, 36], [9, 10], [36, 36], [29, 30]])
        got = table.gather(ids)
        assert got.dtype == torch.float32
        assert got.shape == (4, 2 * TABLE_COLUMNS)
        expected = whole[ids.reshape(-1)].reshape(4, -1)
        if format == "q8_0":
            assert torch.equal(got, dequantise(quantise(whole, "q8_0"))[ids.reshape(-1)].reshape(4, -1))
        else:
            assert torch.equal(got, expected)
        assert torch.equal(table.read_rows(3, 5), table.gather(np.arange(3, 8)[:, None]))
        assert table.gather(np.empty((0, 2), dtype=np.int64)).shape[0] == 0


def touch_everything(folder: Path) -> None:
    """What a load and the first use of each part see; not ``check``."""
    with PackReader(folder) as reader:
        table = reader.load_dense()["table"]
        assert isinstance(table, TableFile)
        table.gather(np.arange(TABLE_ROWS)[:, None])
        for layer in reader.expert_layers:
            for expert in range(reader.num_experts):
                reader.read_expert(layer, expert)


def test_any_flipped_byte_is_found_at_load_or_first_use(pack: Path, tmp_path: Path) -> None:
    touch_everything(pack)
    copy = tmp_path / "copy"
    copy.mkdir()
    whole = read_all(pack)
    for name, data in whole.items():
        (copy / name).write_bytes(data)
    rng = random.Random(7)
    for name, data in whole.items():
        places = {0, len(data) - 1} | {rng.randrange(len(data)) for _ in range(25)}
        for place in sorted(places):
            damaged = bytearray(data)
            damaged[place] ^= rng.choice([0x01, 0x20, 0x80, 0xFF])
            (copy / name).write_bytes(damaged)
            with pytest.raises(CheckpointError) as error:
                touch_everything(copy)
            assert str(copy) in str(error.value), (name, place)
        (copy / name).write_bytes(data)
    touch_everything(copy)


def test_check_finds_damage_and_says_where(pack: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in read_all(pack).items():
        (copy / name).write_bytes(data)
    with PackReader(copy) as reader:
        seen: list[tuple[str, int, int]] = []
        total = reader.check(lambda what, done, of: seen.append((what, done, of)))
        assert seen[-1][1:] == (total, total)
        where = reader.expert_location(1, 2)
    data = bytearray(where.path.read_bytes())
    data[where.offset + 777] ^= 4
    where.path.write_bytes(data)
    with PackReader(copy) as reader, pytest.raises(CheckpointError, match="layer 1, expert 2 is damaged"):
        reader.check()


@pytest.mark.parametrize("cut", [0, 1, 0.5, -1])
def test_cut_and_missing_files_are_named_at_opening(pack: Path, tmp_path: Path, cut: float) -> None:
    for name, data in read_all(pack).items():
        copy = tmp_path / name
        copy.mkdir()
        for other, whole in read_all(pack).items():
            (copy / other).write_bytes(whole)
        if cut == 0:
            (copy / name).unlink()
        else:
            at = int(cut) if cut in (1, -1) else len(data) // 2
            (copy / name).write_bytes(data[:at])
        with pytest.raises(CheckpointError) as error:
            PackReader(copy).close()
        assert str(copy) in str(error.value)


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    """Changes the manifest as a program of another version would have written it: with a sound digest."""
    raw = json.loads((folder / "manifest.json").read_bytes())
    change(raw)
    raw["manifest_sha256"] = "0" * 64

    class Fake:
        def model_dump(self) -> dict:
            return raw

    (folder / "manifest.json").write_bytes(encode_manifest(Fake()))  # type: ignore[arg-type]


@pytest.fixture
def copied(pack: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copied"
    copy.mkdir()
    for name, data in read_all(pack).items():
        (copy / name).write_bytes(data)
    return copy


def test_a_newer_format_names_the_version_needed(copied: Path) -> None:
    rewrite(copied, lambda raw: raw.update(version=99, needs="7.8.9", unheard_of=1))
    with pytest.raises(CheckpointError, match=r"pack format 99.*7\.8\.9 or later"):
        PackReader(copied)


def test_an_older_format_is_upgraded_or_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "FORMAT_NUMBER", 3)
    with pytest.raises(CheckpointError, match="format 1, which is no longer read"):
        PackReader(copied)
    monkeypatch.setitem(manifest_module.UPGRADES, 1, lambda raw: {**raw, "version": 2, "source_name": "a"})
    monkeypatch.setitem(
        manifest_module.UPGRADES, 2, lambda raw: {**raw, "version": 3, "family": raw["source_name"] + "b"}
    )
    with PackReader(copied) as reader:
        assert reader.manifest.version == 3
        assert reader.family == "ab"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version="1"), "format number"),
        (lambda raw: raw.update(version=0), "format number"),
        (lambda raw: raw.pop("dense"), "dense"),
        (lambda raw: raw.update(more=1), "more"),
        (lambda raw: raw["experts"].update(layout=2), "expert layout 2"),
        (lambda raw: raw["experts"].update(hidden=640), "expert layout"),
        (lambda raw: raw["experts"].update(blobs_per_file=0), "blobs_per_file"),
        (lambda raw: raw["dense"]["embed.weight"].update(format="bf16"), "'embed.weight' is not BF16"),
        (lambda raw: raw["tables"]["table"].update(columns=40), "rows of"),
    ],
)
def test_a_manifest_that_contradicts_the_files(copied: Path, change: Callable[[dict], None], message: str) -> None:
    rewrite(copied, change)
    with pytest.raises(CheckpointError, match=message):
        touch_everything(copied)
    assert read_manifest  # the reader itself is exercised above


def test_the_same_input_gives_the_same_bytes(source: Path, pack: Path, tmp_path: Path) -> None:
    again = pack_checkpoint(source, tmp_path / "again", find_tiny, PackOptions(expert_file_bytes=3 * 8192))
    assert read_all(again) == read_all(pack)


def test_what_exists_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        pack_checkpoint(source, tmp_path / "there", find_tiny)
    (tmp_path / "empty").mkdir()
    assert pack_checkpoint(source, tmp_path / "empty", find_tiny).is_dir()
    (tmp_path / "p.unfinished" / "sub").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds a folder"):
        pack_checkpoint(source, tmp_path / "p", find_tiny)


@pytest.mark.parametrize("options", [{"dense": "q4"}, {"hyper": "int8"}, {"experts": "iq3"}])
def test_formats_that_there_are_not(options: dict) -> None:
    with pytest.raises(ConfigError, match="use one of"):
        PackOptions(**options)


def pack_and_die(source: Path, destination: Path, die_at: int) -> int:
    """Packs, with SIGKILL at the n-th step, sync, or rename. Returns the steps counted if it lives."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}
    for name, function in real.items():

        def wrapped(*arguments, function=function, **more):  # type: ignore[no-untyped-def]
            tick()
            result = function(*arguments, **more)
            tick()
            return result

        setattr(os, name, wrapped)
    try:
        pack_checkpoint(source, destination, find_tiny, PackOptions(), lambda *_: tick())
    finally:
        for name, function in real.items():
            setattr(os, name, function)
    return count


def test_sigkill_at_twenty_points_leaves_no_loadable_half(source: Path, tmp_path: Path) -> None:
    steps = pack_and_die(source, tmp_path / "whole", 0)
    expected = read_all(tmp_path / "whole")
    points = sorted({1, steps, steps - 1, steps - 2, steps - 3} | set(random.Random(3).sample(range(2, steps), 20)))
    destination = tmp_path / "pack"
    for point in points:
        status = in_child(lambda point=point: pack_and_die(source, destination, point) and None)
        assert status == -signal.SIGKILL, point
        if destination.exists():
            assert {name: data for name, data in read_all(destination).items() if name != ".lock"} == expected
            touch_everything(destination)
            for file in destination.iterdir():
                file.unlink()
            destination.rmdir()
            continue
        left = destination.with_name("pack.unfinished")
        assert recognise(left).kind is Kind.UNFINISHED_PACK
        with pytest.raises(CheckpointError, match="interrupted"):
            PackReader(left)
    pack_checkpoint(source, destination, find_tiny)
    assert read_all(destination) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack", "whole"]


@pytest.mark.parametrize("at", [1, 5, 20, 40])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_interruption_and_a_full_disk_leave_nothing(
    source: Path, tmp_path: Path, at: int, error: type[BaseException] | OSError
) -> None:
    count = 0

    def stop(*_: object) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise error

    expected = KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError
    with pytest.raises(expected) as caught:
        pack_checkpoint(source, tmp_path / "pack", find_tiny, PackOptions(), stop)
    assert list(tmp_path.iterdir()) == []
    if expected is CheckpointError:
        assert "the disk is full" in str(caught.value)
        assert "bytes are free" not in str(caught.value)
        assert str(caught.value).count("bytes") == 1


@pytest.mark.parametrize("limit", [1000, 20_000, 60_000])
def test_a_file_size_limit_is_told_with_both_numbers(source: Path, tmp_path: Path, limit: int) -> None:
    """A real refusal by the kernel in the dense file, and in the experts' (three points)."""
    said = tmp_path / "said"

    def body() -> None:
        output = os.open(said, os.O_WRONLY | os.O_CREAT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            pack_checkpoint(source, tmp_path / "pack", find_tiny)
        except CheckpointError as error:
            os.write(output, str(error).encode())

    assert in_child(body) == 0
    text = said.read_text()
    assert "past the limit" in text
    assert "needs" in text
    assert "free" in text
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    source: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(path.stat().st_size for path in pack.iterdir())

    class Usage:
        free = 1234

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes, 1234 are free") as error:
        pack_checkpoint(source, tmp_path / "pack", find_tiny)
    said = int(str(error.value).split("needs ")[1].split(" bytes")[0])
    assert needed <= said <= needed * 2
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_pack(source: Path, tmp_path: Path) -> None:
    statuses: list[int] = []

    def second(*_: object) -> None:
        if not statuses:
            statuses.append(in_child(lambda: pack_checkpoint(source, tmp_path / "pack", find_tiny) and None))

    pack_checkpoint(source, tmp_path / "pack", find_tiny, PackOptions(), second)
    assert statuses == [70]
    touch_everything(tmp_path / "pack")


def test_peak_memory_is_bounded_by_the_largest_tensor(source: Path, tmp_path: Path) -> None:
    config = TinyConfig(vocabulary=3 << 17)  # an embedding of 48 MiB
    tensors = tiny_tensors(config)
    largest = max(tensor.nbytes for tensor in tensors.values())
    folder = save_checkpoint(tmp_path / "source", tensors, asdict(config))
    del tensors
    said = tmp_path / "said"

    def body() -> None:
        pack_checkpoint(source, tmp_path / "small", find_tiny)  # all code is loaded now
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory_of_process("VmRSS")
        pack_checkpoint(folder, tmp_path / "large", find_tiny)
        said.write_text(str(memory_of_process("VmHWM") - before))

    assert in_child(body) == 0
    assert largest == 48 << 20
    assert int(said.read_text()) <= 1.2 * largest
