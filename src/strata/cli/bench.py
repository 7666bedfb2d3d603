"""``strata bench kernels|cache|decode|prompt``: kernels beside a plain sum, hit rates, and speed beside its forecast.

Lives in ``cli``; measuring is done by ``kernels.bench``, ``engine.cache_bench`` and ``engine.speed_bench``. Every
benchmark ends in one JSON line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.benchmark_record import record_path
from strata.cli.configure import Configure
from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata.benchmark_record import Record
    from strata.config import Requested

KINDS = ("kernels", "cache", "decode", "prompt")


def command(
    configure: Configure,
    what: Annotated[str, typer.Argument(metavar="kernels|cache|decode|prompt", help="What to measure.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="cache, decode, prompt: the model; else the built-in one.")
    ] = None,
    gib: Annotated[float, typer.Option(help="kernels: GiB of distinct experts, each read once a pass.")] = 4.0,
    repeats: Annotated[int, typer.Option(min=1, help="kernels: passes; the best counts.")] = 5,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="cache: text whose picks are recorded; else Strata's own code.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="cache: tokens of it.")] = 4096,
    prompt: Annotated[int, typer.Option(min=1, help="decode, prompt: tokens of each fresh prompt.")] = 512,
    decode: Annotated[int, typer.Option(min=1, help="decode, prompt: tokens decoded after it.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="decode, prompt: prompts; the median counts.")] = 3,
    measure: Annotated[
        bool, typer.Option("--measure", help="decode, prompt: measure this machine again for the forecast.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="cache: draw hit rate against slots.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the record in FOLDER/<machine>/.")] = None,
    machine: Annotated[str, typer.Option(help="What this machine is called in a kept record.")] = "this-pc",
) -> int:
    """Measures this machine's kernels, what each cache policy would hit, or a model's speed beside its forecast."""
    if what not in KINDS:
        raise ConfigError(f"bench {what!r} is not known", f"use one of: {', '.join(KINDS)}")
    requested = configure(name)
    if what == "cache":
        record = bench_cache(requested, text, tokens, plot)
    elif what == "kernels":
        record = bench_kernels(requested, gib, repeats)
    else:
        record = bench_speed(requested, what, prompt, decode, runs, measure)
    if out is not None:
        record.write(record_path(out, machine, what))
    print(record.line())
    return 0


def bench_kernels(requested: Requested, gib: float, repeats: int) -> Record:
    from strata.kernels import bench

    threads = None if isinstance(requested.threads, str) else requested.threads
    record = bench.bench_kernels(gib=gib, threads=threads, repeats=repeats)
    for name, figure in record.figures.items():
        share = f", {figure.percent} % of a plain sum's {figure.ceiling:.2f}" if figure.ceiling else ""
        print(f"{name}: {figure.value:.2f} {figure.unit}{share}")
    return record


def bench_cache(requested: Requested, text: Path | None, tokens: int, plot: Path | None) -> Record:
    from strata.engine import cache_bench

    table, record = cache_bench.bench_cache(requested, text=read_text(text), tokens=tokens)
    print("\n".join(table.lines()))
    if plot is not None:
        cache_bench.draw_cache(table, plot)
        print(f"drawn: {plot}")
    return record


def bench_speed(requested: Requested, what: str, prompt: int, decode: int, runs: int, measure: bool) -> Record:
    from strata.engine import speed_bench

    bench, record = speed_bench.bench_speed(
        requested,
        "decode" if what == "decode" else "prompt",
        prompt=prompt,
        tokens=decode,
        runs=runs,
        measure=measure,
        command=f"strata bench {what}",
    )
    print("\n".join(bench.lines()))
    return record


def read_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}", "give a UTF-8 text file") from error
