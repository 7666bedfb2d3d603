"""Runs every benchmark of this folder in turn, as `make bench` does.

A benchmark is a script here that takes ``--machine NAME``, writes benchmarks/results/NAME/<shape>.json with
``strata.benchmark_record`` and prints that record as its last line. ``--only`` picks some by name. Those whose name
ends in ``_card`` need an NVIDIA card and are left out where there is none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from strata.errors import StrataError
from strata.kernels.cuda.driver import read_cards

HERE = Path(__file__).resolve().parent


def benchmarks() -> dict[str, Path]:
    """Name -> script of all benchmarks, in the order of their names."""
    return {path.stem: path for path in sorted(HERE.glob("*.py")) if path != Path(__file__).resolve()}


def has_card() -> bool:
    try:
        return bool(read_cards())
    except StrataError:
        return False


def main() -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(description="Runs every benchmark of this folder in turn.")
    parser.add_argument("--machine", required=True, help="what this machine is called in benchmarks/results")
    parser.add_argument("--only", nargs="*", choices=list(known), default=list(known), help="these alone")
    words = parser.parse_args()
    failed = []
    for name in words.only:
        if name.endswith("_card") and not has_card():
            print(f"== {name}: left out, there is no NVIDIA card")
            continue
        print(f"== {name}", flush=True)
        started = time.monotonic()
        status = subprocess.run([sys.executable, str(known[name]), "--machine", words.machine], check=False).returncode
        print(f"== {name}: status {status}, {time.monotonic() - started:.0f} s", flush=True)
        failed += [name] if status else []
    if failed:
        print(f"strata: error: {len(failed)} of {len(words.only)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
