"""Packs what a later part of training needs into one folder of bounded size, and unpacks it on the training machine.

    python tools/train/carry.py pack --tokens TOKENS --checkpoint OUT --to CARRY --bytes 54000000
    python tools/train/carry.py unpack --carry CARRY --to DIR

``pack`` takes the BF16 weights, the chat and held-out streams, meta.json and the tokenizer whole, and as much of the
start of the code stream as still fits (its documents lie in random order). Weights are split into their high bytes,
which xz takes to two fifths, and their low bytes, which nothing shortens. ``unpack`` restores every file to the byte:
DIR/tokens and DIR/weights serve train.py as ``--tokens`` and ``--weights``. Knows files, not the model.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from data import load_code

__all__ = ["pack", "unpack"]

TOKEN_FILES = ("chat.u16.xz", "heldout.u16.xz", "meta.json", "tokenizer.json", "tokenizer_config.json",
               "generation_config.json")  # fmt: skip
WEIGHT_FILES = ("model.safetensors.index.json", "config.json", "figures.json")
LEAST_CODE = 1_000_000  # tokens
STEP = 0.97


def pack(tokens: Path, checkpoint: Path, to: Path, most: int) -> int:
    """Writes the folder; returns the tokens of code that fitted. Exits where the rest alone is too large."""
    for name in ("tokens", "weights"):
        (to / name).mkdir(parents=True, exist_ok=True)
    for name in TOKEN_FILES:
        shutil.copy(tokens / name, to / "tokens" / name)
    for name in WEIGHT_FILES:
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, to / "weights" / name)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda path: _split(path, to / "weights"), sorted(checkpoint.glob("model*.safetensors"))))
    (to / "tokens" / "code-0.u16.xz").unlink(missing_ok=True)
    room = most - sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    code = load_code(tokens)
    count = min(len(code), room // 2 * 3)  # a first guess: xz brings a token to about five bits
    while count >= LEAST_CODE:
        packed = lzma.compress(code[:count].astype("<u2").tobytes(), preset=4)
        if len(packed) <= room:
            (to / "tokens" / "code-0.u16.xz").write_bytes(packed)
            return count
        count = int(count * min(STEP, room / len(packed)))
    sys.exit(f"{to}: no room for {LEAST_CODE:,} tokens of code in {most:,} bytes: allow more with --bytes")


def _split(path: Path, folder: Path) -> None:
    """A file's even bytes as they are and its odd bytes in xz; of an odd length the last byte is an even one."""
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    (folder / f"{path.name}.even").write_bytes(data[0::2].tobytes())
    (folder / f"{path.name}.odd.xz").write_bytes(lzma.compress(data[1::2].tobytes(), preset=1))


def unpack(carry: Path, to: Path) -> None:
    """Writes DIR/tokens and DIR/weights."""
    for name in ("tokens", "weights"):
        (to / name).mkdir(parents=True, exist_ok=True)
        for path in sorted((carry / name).iterdir()):
            if path.suffix not in (".even",) and not path.name.endswith(".odd.xz"):
                shutil.copy(path, to / name / path.name)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda path: _join(path, to / "weights"), sorted((carry / "weights").glob("*.even"))))


def _join(path: Path, folder: Path) -> None:
    even = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    odd = np.frombuffer(lzma.decompress(path.with_suffix(".odd.xz").read_bytes()), dtype=np.uint8)
    data = np.empty(len(even) + len(odd), dtype=np.uint8)
    data[0::2], data[1::2] = even, odd
    (folder / path.stem).write_bytes(data.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--tokens", type=Path, required=True)
    packing.add_argument("--checkpoint", type=Path, required=True)
    packing.add_argument("--to", type=Path, required=True)
    packing.add_argument("--bytes", type=int, default=54_000_000, help="of the whole folder, at most")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("--carry", type=Path, required=True)
    unpacking.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "pack":
        count = pack(args.tokens, args.checkpoint, args.to, args.bytes)
        print(f"{args.to}: {count:,} tokens of code")
    else:
        unpack(args.carry, args.to)


if __name__ == "__main__":
    main()
