"""What the tree may hold: no large file, nothing of one machine, pages and pins that match their sources."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.load_tool import load_tool

LARGEST_BYTES = 30 * 1024 * 1024
TAILS = (r"pi\.org", "hosted", r"js\.org", r"\.debian\.org")
# Words are put together here so that this file does not hold them either.
REGISTRIES = re.compile(
    "|".join(("py" + r"pi\.org", "python" + r"hosted", "npm" + r"js\.org", "deb" + r"\.debian\.org"))
)
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|farm|root)/")
OWN_TOOLS = re.compile(r"\.lib" + "rary/")


def tracked(root: Path) -> list[Path]:
    """Files that git holds, or all files of an unpacked source distribution."""
    result = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
    names = result.stdout.split("\0") if result.returncode == 0 else []
    found = [root / name for name in names if name]
    assert found, "no files found: is this a checkout?"
    return [path for path in found if path.is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_large_file(root: Path) -> None:
    assert not [path for path in tracked(root) if path.stat().st_size > LARGEST_BYTES]


@pytest.mark.parametrize("words", [REGISTRIES, MACHINE_PATHS, OWN_TOOLS], ids=["registries", "paths", "tools"])
def test_the_tree_speaks_of_itself_alone(root: Path, words: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in tracked(root)
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if words.search(line)
    ]
    assert not found


def test_constraints_pin_what_is_installed(root: Path) -> None:
    lock = load_tool("lock")
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert pinned["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9][\w.]*", version) for version in pinned.values())
    needed = lock.closure(lock.project_requirements("dev"))
    assert needed.items() <= pinned.items(), "run `make lock`"


def test_the_reference_is_up_to_date() -> None:
    reference = load_tool("reference")
    assert reference.PAGE.read_text() == reference.render(), "run `make generate`"


def test_decision_records_are_listed() -> None:
    index = load_tool("decision_index")
    assert index.PAGE.read_text() == index.render(), "run `make generate`"
    records = sorted(path.name for path in index.PAGE.parent.glob("[0-9]*.md"))
    numbers = [name[:4] for name in records]
    assert len(set(numbers)) == len(numbers), "a number is used twice"


def test_links_between_pages_lead_somewhere(root: Path) -> None:
    broken = []
    for path in tracked(root):
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(path)):
                if "://" not in target and not (path.parent / target).exists():
                    broken.append(f"{path.relative_to(root)} -> {target}")
    assert not broken
