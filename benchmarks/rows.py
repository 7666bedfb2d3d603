"""The native dense product beside a plain sum over the same memory (1 and 4 rows) and beside FMA (512 rows): rows.json.

    python benchmarks/rows.py --machine cpu2 --threads 2

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from strata.benchmark_record import record_path
from strata.errors import StrataError
from strata.kernels.row_bench import bench_rows

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the native dense product.")
    parser.add_argument("--machine", required=True, help="what this machine is called in benchmarks/results")
    parser.add_argument("--threads", type=int, help="threads, the caller included; default: the physical cores")
    parser.add_argument("--gib", type=float, default=1.0, help="weights in memory, each read once a pass")
    parser.add_argument("--repeats", type=int, default=5, help="passes; the best counts")
    words = parser.parse_args()
    command = f"python benchmarks/rows.py --machine {words.machine}"
    command += f" --threads {words.threads}" if words.threads else ""
    command += f" --gib {words.gib:g}" if words.gib != 1.0 else ""
    try:
        record = bench_rows(gib=words.gib, threads=words.threads, repeats=words.repeats, command=command)
        record.write(record_path(RESULTS, words.machine, "rows"))
    except StrataError as error:
        print(f"strata: error: {error}", file=sys.stderr)
        return error.exit_status
    for name, figure in record.figures.items():
        print(f"{name}: {figure.value:.2f} {figure.unit}, {figure.percent} % of {figure.ceiling:.2f}")
    print(record.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
