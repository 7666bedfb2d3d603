"""Names that a pack gives to its files: plain ones of its folder, of regular files, and links where links may be."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from strata import files
from strata.checkpoint.description import describe_pack
from strata.checkpoint.export import export_checkpoint
from strata.checkpoint.pack_reader import PackReader
from strata.checkpoint.pack_writer import PackOptions, pack_checkpoint
from strata.checkpoint.safetensors_reader import Checkpoint
from strata.errors import CheckpointError
from strata.experts.source import ExpertSource
from strata.files import NotRegularError, open_regular
from strata.memory.system import system
from tests.checkpoint.signed_manifests import rewrite
from tests.checkpoint.tiny_family import TinyConfig, find_tiny, save_checkpoint, tiny_tensors

BAD_NAMES = {
    "above": "../x",
    "here": ".",
    "up": "..",
    "below": "inside/x",
    "absolute": "/etc/hostname",
    "of Windows": "..\\x",
    "of a drive": "C:x",
    "none": "",
    "a null byte": "a\0b",
    "an escape": "a\x1b[2Jb",
    "a line": "a\nb",
    "half a pair": "a\ud800",
    "long": "x" * 100_000,
    "long in bytes": "\u00e4" * 128,
}
SMALL = ("manifest.json", "dense.safetensors", "expert-tables.safetensors", "tokenizer.json", "chat_template.jinja")
LARGE = ("experts-00001.bin", "table-00.rows")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("source") / "tiny", tiny_tensors(), asdict(TinyConfig()))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = PackOptions(expert_file_bytes=3 * 8192)
    return pack_checkpoint(source, tmp_path_factory.mktemp("packs") / "pack", find_tiny, options)


@pytest.fixture
def pack(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "pack"))


def refused(pack: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        PackReader(pack, find_tiny)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 1000
    return line


@pytest.mark.parametrize("kind", ["table", "experts", "tokenizer", "checked"])
@pytest.mark.parametrize("case", BAD_NAMES)
def test_a_name_that_is_no_plain_file_name_is_refused(pack: Path, case: str, kind: str) -> None:
    """Where the name leads, there is the very file that it replaces."""
    name, old = BAD_NAMES[case], {"table": LARGE[1], "experts": LARGE[0]}.get(kind, "chat_template.jinja")
    (pack / "inside").mkdir()
    for place in ("../x", "inside/x"):
        shutil.copy(pack / old, pack / place)

    def change(raw: dict[str, Any]) -> None:
        if kind == "table":
            raw["tables"]["table"]["file"] = name
        elif kind == "experts":
            raw["experts"]["files"][1] = name
        else:
            raw["files"][name] = raw["files"].pop(old)
            if kind == "tokenizer":
                raw["tokenizer_files"][raw["tokenizer_files"].index(old)] = name

    rewrite(pack, change)
    assert "plain file name" in (line := refused(pack)) or "longer than 255 bytes" in line


@pytest.mark.parametrize("name", ["config.json", "Manifest.json", "model.safetensors", "expert-profile.json"])
def test_a_tokenizer_file_has_no_name_of_another_file(pack: Path, name: str) -> None:
    """An export would write over it, or read it as something else."""
    if name not in os.listdir(pack):
        (pack / name).write_bytes((pack / "chat_template.jinja").read_bytes())

    def change(raw: dict[str, Any]) -> None:
        raw["files"][name] = raw["files"].pop("chat_template.jinja")
        raw["tokenizer_files"] = ["tokenizer.json", name]

    rewrite(pack, change)
    assert "is the name of another file" in refused(pack)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_file_is_no_link(pack: Path, name: str, tmp_path: Path) -> None:
    (pack / name).rename(tmp_path / "elsewhere")
    (pack / name).symlink_to(tmp_path / "elsewhere")
    assert f"{pack / name} cannot be read: it is a link, not a file" in refused(pack)


@pytest.mark.parametrize("name", LARGE)
def test_files_of_experts_and_tables_may_be_links_and_are_named(
    pack: Path, whole: Path, name: str, tmp_path: Path
) -> None:
    (pack / name).rename(tmp_path / "elsewhere")
    (pack / name).symlink_to(tmp_path / "elsewhere")
    with PackReader(whole, find_tiny) as plain, PackReader(pack, find_tiny) as reader:
        assert describe_pack(plain)["links"] == {}
        assert describe_pack(reader)["links"] == {name: str(tmp_path / "elsewhere")}
        assert reader.check() == plain.check()
    target = export_checkpoint(pack, tmp_path / "exported", find_family=find_tiny)
    assert all(stat.S_ISREG(path.lstat().st_mode) for path in target.iterdir()), "bytes are copied, never a link"
    (tmp_path / "elsewhere").unlink()
    assert f"1 files are missing: {name}" in refused(pack)


def put(kind: str, path: Path) -> socket.socket | None:
    path.unlink()
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        bound = socket.socket(socket.AF_UNIX)
        here = Path.cwd()
        os.chdir(path.parent)  # the whole path would be too long for a socket
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)
        return bound
    return None


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a socket", "a device"])
@pytest.mark.parametrize("name", SMALL + LARGE)
def test_what_is_no_regular_file_is_refused_at_once(pack: Path, name: str, kind: str) -> None:
    """Nobody writes to the pipe, and the device has no end: waiting for either would end the test run."""
    held = put(kind, pack / name)
    line = refused(pack)
    if name != "manifest.json":  # without it the folder is no pack at all
        assert str(pack / name) in line
        assert "a link" in line if kind == "a device" and name in SMALL else kind in line
    if held is not None:
        held.close()


@pytest.mark.parametrize("follow", [True, False])
def test_what_was_opened_is_looked_at_and_not_only_the_name(
    tmp_path: Path, follow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file becomes a pipe between the look and the opening."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    looks = []
    look = files._check_regular

    def and_then_swap(name: Path, status: os.stat_result) -> None:
        look(name, status)
        if not looks:
            path.unlink()
            os.mkfifo(path)
        looks.append(name)

    monkeypatch.setattr(files, "_check_regular", and_then_swap)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotRegularError, match="a named pipe"):
        open_regular(path, follow=follow)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_becomes_a_link_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to("target")
    monkeypatch.setattr(files, "_check_regular", lambda *_: None)
    with pytest.raises(NotRegularError, match="a link"):
        open_regular(tmp_path / "link", follow=False)
    os.close(open_regular(tmp_path / "link"))


def test_experts_that_become_a_pipe_after_the_look(pack: Path) -> None:
    """What reads blobs opens the files again."""
    with PackReader(pack, find_tiny) as reader:
        where = reader.expert_location(1, 0)
        put("a named pipe", where.path)
        with pytest.raises(CheckpointError, match="a named pipe"):
            reader.read_expert(1, 0)
        with pytest.raises(CheckpointError, match="a named pipe"):
            ExpertSource._open_once(where.path, direct=False)
        with pytest.raises(OSError, match="a named pipe"):
            system.map_file(where.path)


def test_export_writes_the_bytes_that_were_checked(pack: Path, tmp_path: Path) -> None:
    with PackReader(pack, find_tiny) as reader:
        (pack / "chat_template.jinja").write_text("{{ y }}")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja is damaged"):
            reader.read_tokenizer_file("chat_template.jinja")
    (pack / "chat_template.jinja").write_text("{{ x }}")
    target = export_checkpoint(pack, tmp_path / "exported", find_family=find_tiny)
    assert (target / "chat_template.jinja").read_text() == "{{ x }}"


def test_a_checkpoint_may_be_made_of_links_as_download_caches_are(source: Path, whole: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    with Checkpoint(linked) as checkpoint, Checkpoint(source) as plain:
        assert checkpoint.specs.keys() == plain.specs.keys()
    made = pack_checkpoint(linked, tmp_path / "pack", find_tiny, PackOptions(expert_file_bytes=3 * 8192))
    assert all(stat.S_ISREG(path.lstat().st_mode) for path in made.iterdir())
    assert all(path.read_bytes() == (whole / path.name).read_bytes() for path in made.iterdir() if path.name in LARGE)


def test_a_folder_of_an_odd_name_is_packed_under_one_that_can_be_printed(source: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"a\x1b\xffb")
    shutil.copytree(source, odd)
    made = pack_checkpoint(odd, tmp_path / "pack", find_tiny)
    assert json.loads((made / "manifest.json").read_bytes())["source_name"] == "a??b"
    PackReader(made, find_tiny).close()
