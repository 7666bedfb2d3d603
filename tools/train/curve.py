"""Draws the loss curve of several parts one after the other.

    python tools/train/curve.py --logs OUT1/log.jsonl OUT2/log.jsonl --out loss.png

Knows the trainer's log lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from train import plot

__all__ = ["joined"]


def joined(logs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One log whose steps go on counting."""
    found: list[dict[str, Any]] = []
    for log in logs:
        base = found[-1]["step"] if found else 0
        found += [entry | {"step": entry["step"] + base} for entry in log]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    plot(joined([[json.loads(line) for line in path.read_text().splitlines()] for path in args.logs]), args.out)


if __name__ == "__main__":
    main()
