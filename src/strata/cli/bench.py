"""``strata bench kernels``: what the native expert kernel reaches beside a plain sum over the same memory.

Lives in ``cli``; measuring is ``kernels.bench``'s. Every benchmark ends in one JSON line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.benchmark_record import record_path
from strata.errors import ConfigError

KINDS = ("kernels",)


def command(
    what: Annotated[str, typer.Argument(metavar="kernels", help="What to measure.")],
    threads: Annotated[int | None, typer.Option(help="Threads; default is one a physical core.")] = None,
    gib: Annotated[float, typer.Option(help="GiB of distinct experts, each read once a pass.")] = 4.0,
    repeats: Annotated[int, typer.Option(min=1, help="Passes; the best counts.")] = 5,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the record in FOLDER/<machine>/.")] = None,
    machine: Annotated[str, typer.Option(help="What this machine is called in a kept record.")] = "this-pc",
) -> int:
    """Measures the kernels of this machine."""
    if what not in KINDS:
        raise ConfigError(f"bench {what!r} is not known", f"use one of: {', '.join(KINDS)}")
    from strata.kernels.bench import bench_kernels

    record = bench_kernels(gib=gib, threads=threads, repeats=repeats)
    for name, figure in record.figures.items():
        share = f", {figure.percent} % of a plain sum's {figure.ceiling:.2f}" if figure.ceiling else ""
        print(f"{name}: {figure.value:.2f} {figure.unit}{share}")
    if out is not None:
        record.write(record_path(out, machine, what))
    print(record.line())
    return 0
