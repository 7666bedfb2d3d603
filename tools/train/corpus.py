"""Builds the training text: one command, the same bytes on every run over the same package versions.

    python tools/train/corpus.py fetch --cache DIR          the extra packages, as wheels
    python tools/train/corpus.py build --cache DIR --out DIR

Writes ``text-train-{0,1}.jsonl.xz`` and ``text-heldout.jsonl.xz`` (JSON lines: ``{"k": "code", "t": text}`` and
``{"k": "chat", "m": [[role, content], ...]}``) and ``corpus.json`` (per package: version, licence, bytes; what was left
out and why; the sha256 of each file). Knows nothing of tokens: token counts and retrieval lines are pack.py's.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import random
import subprocess
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sources import EXTRA_PACKAGES, HELD_OUT, Source, installed_sources, is_test, refusal, wheel_sources

SEED = 1234
NEAR = 0.5  # a file half of whose long lines were seen before is a near duplicate
TEST_SHARE = 0.10  # of the code bytes; test code repeats itself
CHAT_SHARE = 0.20  # of all bytes
MAX_CODE_BYTES = 150_000_000
_PREFIXES = ("Complete this function.", "Write this function.", "Implement the function below.", "Fill in the body.")
_SYSTEMS = ("You are a helpful assistant.", "You write short Python functions.", "You complete Python code.")


@dataclass
class File:
    """One file that may be read. ``lines`` are hashes of its long normalised lines."""

    package: str
    path: str
    text: str
    test: bool
    lines: list[int] = field(repr=False)


def line_hashes(text: str) -> list[int]:
    """64-bit hashes of the lines that say something: stripped, at least 12 characters, no comments, no imports."""
    hashes = []
    for line in text.split("\n"):
        bare = "".join(line.split())
        if len(bare) >= 12 and not bare.startswith(("#", "import", "from", '"""')):
            hashes.append(int.from_bytes(hashlib.blake2b(bare.encode(), digest_size=8).digest(), "little"))
    return hashes


def read_files(sources: Iterable[Source], reasons: Counter[str]) -> list[File]:
    """Every acceptable file, in the order of the sources; ``reasons`` counts the others."""
    files = []
    for source in sources:
        for path, text in source.texts():
            why = refusal(path, text)
            if why:
                reasons[why] += 1
                continue
            files.append(File(source.name, path, text, is_test(path), line_hashes(text)))
    return files


def drop_duplicates(files: list[File], reasons: Counter[str]) -> list[File]:
    """Keeps the first of each set of equal or near files; tests and long files come last within a package's turn."""
    seen: set[int] = set()
    kept = []
    for file in files:
        old = sum(h in seen for h in file.lines)
        if file.lines and old >= NEAR * len(file.lines):
            reasons["near duplicate"] += 1
            continue
        if len(file.lines) < 5:
            reasons["too little code"] += 1
            continue
        seen.update(file.lines)
        kept.append(file)
    return kept


def split_held_out(files: list[File], reasons: Counter[str]) -> tuple[list[File], list[File]]:
    """(train, held out). A training file near a held-out one, in either direction, is dropped."""
    held = [f for f in files if f.package in HELD_OUT]
    train = [f for f in files if f.package not in HELD_OUT]
    owners: dict[int, set[int]] = defaultdict(set)
    for index, file in enumerate(held):
        for h in file.lines:
            owners[h].add(index)
    kept = []
    for file in train:
        shared: Counter[int] = Counter(o for h in set(file.lines) for o in owners.get(h, ()))
        near = any(
            n >= NEAR * len(set(file.lines)) or n >= NEAR * len(set(held[o].lines)) for o, n in shared.items() if n >= 5
        )
        if near:
            reasons["near a held-out file"] += 1
        else:
            kept.append(file)
    return kept, held


def chat_examples(text: str) -> list[list[list[str]]]:
    """(user: signature and docstring, assistant: the function without it) of each short documented function."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        doc = node.body[0]
        if not (isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)):
            continue
        if doc.lineno == node.lineno or node.body[1].lineno <= (doc.end_lineno or doc.lineno):
            continue
        head = lines[node.lineno - 1 : doc.lineno - 1]
        asked = textwrap.dedent("\n".join(lines[node.lineno - 1 : doc.end_lineno]))
        body = lines[doc.end_lineno : node.end_lineno]
        answer = textwrap.dedent("\n".join([*head, *body])).strip("\n")
        if len(asked) <= 600 and 40 <= len(answer) <= 1000 and "\n" in answer and answer.startswith(("def ", "async ")):
            found.append([["user", asked], ["assistant", answer]])
    return found


def make_chats(files: list[File], target_bytes: int, rng: random.Random) -> list[list[list[str]]]:
    """Conversations of one to three exchanges until ``target_bytes``; some with a system line or a request in words."""
    pairs = [pair for file in files if not file.test for pair in chat_examples(file.text)]
    rng.shuffle(pairs)
    chats: list[list[list[str]]] = []
    total = position = 0
    while position < len(pairs) and total < target_bytes:
        turns = rng.choices((1, 2, 3), (6, 3, 1))[0]
        chat: list[list[str]] = [["system", rng.choice(_SYSTEMS)]] if rng.random() < 0.2 else []
        for user, assistant in pairs[position : position + turns]:
            content = f"{rng.choice(_PREFIXES)}\n\n{user[1]}" if rng.random() < 0.25 else user[1]
            chat += [["user", content], assistant]
        position += turns
        total += sum(len(content) for _, content in chat)
        chats.append(chat)
    return chats


def take_code(files: list[File], rng: random.Random, reasons: Counter[str]) -> list[File]:
    """All non-test files and a share of the tests, shuffled, within ``MAX_CODE_BYTES``."""
    rng.shuffle(files)
    plain = [f for f in files if not f.test]
    budget = TEST_SHARE / (1 - TEST_SHARE) * sum(len(f.text) for f in plain)
    for file in files:
        if file.test and budget > 0:
            plain.append(file)
            budget -= len(file.text)
    reasons["test code over its share"] += len(files) - len(plain)
    rng.shuffle(plain)
    total, kept = 0, []
    for file in plain:
        if total + len(file.text) <= MAX_CODE_BYTES:
            total += len(file.text)
            kept.append(file)
    reasons["over the size of the text"] += len(plain) - len(kept)
    return kept


def _write(job: tuple[Path, bytes]) -> tuple[str, int, str]:
    path, data = job
    packed = lzma.compress(data, preset=7)
    path.write_bytes(packed)
    return path.name, len(packed), hashlib.sha256(packed).hexdigest()


def _lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in records).encode()


def build(cache: Path, out: Path) -> None:
    """Reads the sources, filters, splits, writes the text and ``corpus.json``."""
    out.mkdir(parents=True, exist_ok=True)
    rng, reasons = random.Random(SEED), Counter[str]()
    installed, refused = installed_sources()
    wheels, refused_wheels = wheel_sources(cache)
    sources = {s.name: s for s in [*wheels, *installed]}
    missing = sorted(set(EXTRA_PACKAGES) - sources.keys()) + sorted(HELD_OUT - sources.keys())
    if missing:
        sys.exit(f"packages not found: {', '.join(missing)} (run: corpus.py fetch --cache {cache})")
    files = read_files([sources[name] for name in sorted(sources, key=lambda n: (n not in HELD_OUT, n))], reasons)
    train, held = split_held_out(drop_duplicates(files, reasons), reasons)
    code = take_code(train, rng, reasons)
    code_bytes = sum(len(f.text) for f in code)
    chats = make_chats(code, int(CHAT_SHARE / (1 - CHAT_SHARE) * code_bytes), rng)
    records: list[dict[str, Any]] = [{"k": "code", "t": f.text} for f in code] + [{"k": "chat", "m": c} for c in chats]
    rng.shuffle(records)
    held_records = [{"k": "code", "p": f.package, "f": f.path, "t": f.text} for f in held]
    half = len(records) // 2
    jobs = [
        (out / "text-train-0.jsonl.xz", _lines(records[:half])),
        (out / "text-train-1.jsonl.xz", _lines(records[half:])),
        (out / "text-heldout.jsonl.xz", _lines(held_records)),
    ]
    with ProcessPoolExecutor(2) as pool:
        written = list(pool.map(_write, jobs))
    used, held_used = Counter[str](), Counter[str]()
    for f in code:
        used[f.package] += len(f.text.encode())
    for f in held:
        held_used[f.package] += len(f.text.encode())
    summary = {
        "seed": SEED,
        "train_bytes": len(jobs[0][1]) + len(jobs[1][1]),
        "chat_bytes": sum(len(c) for chat in chats for _, c in chat),
        "held_out_bytes": sum(held_used.values()),
        "files": [{"name": n, "bytes": b, "sha256": h} for n, b, h in written],
        "left_out_files": dict(sorted(reasons.items())),
        "left_out_packages": sorted({*refused, *refused_wheels}),
        "sources": [
            {"name": n, "version": sources[n].version, "licence": sources[n].licence, "bytes": used[n] + held_used[n]}
            | ({"held_out": True} if n in HELD_OUT else {})
            for n in sorted(sources)
            if used[n] + held_used[n]
        ],
    }
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({k: v for k, v in summary.items() if k != "sources"}, indent=1))


def fetch(cache: Path) -> None:
    """Downloads the extra packages' wheels (any CPython 3.11 Linux wheel will do: only .py files are read)."""
    cache.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(cache),
            *EXTRA_PACKAGES,
        ],
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("fetch", "build"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.action == "fetch":
        fetch(args.cache)
    elif args.out is None:
        parser.error("build needs --out")
    else:
        build(args.cache, args.out)


if __name__ == "__main__":
    main()
