"""The walls between the rooms: what each may import, and which words it may know. See docs/architecture.md."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

from tests.source_tree import PACKAGE, ROOMS, files, imports_of, room_of

# The operating system's own interfaces. `kernels` binds the native library and fakes a device in mapped memory.
SYSTEM = {"mmap", "resource", "fcntl", "ctypes", "psutil", "pynvml", "msvcrt", "winreg", "_winapi"}
SYSTEM_ALLOWED = {"memory": SYSTEM, "kernels": {"ctypes", "mmap"}}
# Words of model families, publishers' names included. Only `models/` and what a family's own text format needs.
FAMILY_WORDS = re.compile(r"qwen|flash.?next|deepseek|mixtral|llama(?!\.cpp)|gpt.?oss|glm.?4|kimi|gemma|olmoe", re.I)
FOREIGN_STORES = re.compile(r"ollama", re.I)  # recognised in order to be refused


def top_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room: str) -> None:
    above = set(ROOMS[: ROOMS.index(room)])
    wrong = [
        str(one)
        for path in files()
        if room_of(path) == room
        for one in imports_of(path)
        if top_of(one.module) == "strata" and one.module.split(".")[1:2] and one.module.split(".")[1] in above
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_room() -> None:
    folders = {room_of(path) for path in files()} - {""}
    assert folders <= set(ROOMS), f"no room of docs/architecture.md: {sorted(folders - set(ROOMS))}"


def test_top_files_import_no_room() -> None:
    allowed = {"__init__.py", "console.py"}  # the public API, found on first use, and the way to the commands
    wrong = [
        str(one)
        for path in files()
        if room_of(path) == "" and path.name not in allowed
        for one in imports_of(path)
        if any(one.module == f"strata.{room}" or one.module.startswith(f"strata.{room}.") for room in ROOMS)
    ]
    assert not wrong, "\n".join(wrong)


def test_server_and_cli_never_see_tensors() -> None:
    wrong = [
        str(one)
        for path in files()
        if room_of(path) in ("cli", "server")
        for one in imports_of(path)
        if top_of(one.module) in {"torch", "numpy", "safetensors"}
    ]
    assert not wrong, "\n".join(wrong)


def test_only_memory_knows_the_operating_system() -> None:
    wrong = [
        str(one)
        for path in files()
        for one in imports_of(path)
        if top_of(one.module) in SYSTEM - SYSTEM_ALLOWED.get(room_of(path), set())
    ]
    assert not wrong, "\n".join(wrong)


def test_only_kernels_knows_backends() -> None:
    wrong = [
        str(one)
        for path in files()
        if room_of(path) != "kernels"
        for one in imports_of(path)
        if top_of(one.module) in {"cuda", "triton"}
    ]
    wrong += [str(path) for path in files() if room_of(path) != "kernels" and "libstrata" in path.read_text()]
    assert not wrong, "\n".join(wrong)


def test_no_oracle_in_the_package() -> None:
    oracles = {"transformers", "compressed_tensors", "openai", "hypothesis", "pytest"}
    wrong = [str(one) for path in files() for one in imports_of(path) if top_of(one.module) in oracles]
    assert not wrong, "\n".join(wrong)


def words_of(path: Path) -> list[tuple[int, str]]:
    """Lines of a file with what it says in code and strings; comments and docstrings may speak of anything."""
    with tokenize.open(path) as handle:
        tokens = list(tokenize.generate_tokens(handle.readline))
    kept = []
    for index, token in enumerate(tokens):
        is_docstring = token.type == tokenize.STRING and (
            index == 0 or tokens[index - 1].type in (tokenize.INDENT, tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT)
        )
        if token.type in (tokenize.NAME, tokenize.STRING) and not is_docstring:
            kept.append((token.start[0], token.string))
    return kept


def test_only_models_knows_model_names() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} says {word}"
        for path in files()
        if room_of(path) != "models"
        for line, word in words_of(path)
        if FAMILY_WORDS.search(FOREIGN_STORES.sub("", word))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_configuration_reads_the_environment() -> None:
    allowed = {
        "config_sources.py",
        "paths.py",
        "kernels/cpu/library.py",  # STRATA_ISA, before any configuration: which code the library may run
    }
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in files()
        if path.relative_to(PACKAGE).as_posix() not in allowed
        and re.search(r"os\.environ|os\.getenv", path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)
