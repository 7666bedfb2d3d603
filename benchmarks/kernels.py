"""The native expert kernel beside a plain sum over the same memory, 1 and 4 rows: kernels.json.

    python benchmarks/kernels.py --machine cpu2 --threads 2

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from strata.benchmark_record import record_path
from strata.errors import StrataError
from strata.kernels.bench import bench_kernels, describe

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the native expert kernel.")
    parser.add_argument("--machine", required=True, help="what this machine is called in benchmarks/results")
    parser.add_argument("--threads", type=int, help="threads, the caller included; default: the physical cores")
    parser.add_argument("--gib", type=float, default=4.0, help="experts in memory, each read once a pass")
    parser.add_argument("--repeats", type=int, default=5, help="passes; the best counts")
    parser.add_argument("--gpu", action="store_true", help="also the GPU's kernel on page-locked RAM, alone and beside")
    words = parser.parse_args()
    command = f"python benchmarks/kernels.py --machine {words.machine}"
    command += f" --threads {words.threads}" if words.threads else ""
    command += f" --gib {words.gib:g}" if words.gib != 4.0 else ""
    command += " --gpu" if words.gpu else ""
    try:
        record = bench_kernels(gib=words.gib, threads=words.threads, repeats=words.repeats, command=command)
        if words.gpu:
            from strata.kernels.cuda.bench import bench_alias

            more = bench_alias(gib=words.gib, threads=words.threads)
            record = replace(record, figures={**record.figures, **more})
        record.write(record_path(RESULTS, words.machine, "kernels"))
    except StrataError as error:
        print(f"strata: error: {error}", file=sys.stderr)
        return error.exit_status
    print("\n".join(describe(record)))
    print(record.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
