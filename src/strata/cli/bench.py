"""``strata bench``: kernels beside a plain sum, hit rates, speed beside its forecast, and synthetic models.

Lives in ``cli``; measuring is done by ``kernels.bench``, ``engine.cache_bench``, ``engine.speed_bench`` and
``engine.synthetic_bench``. Every benchmark ends in one JSON line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata import interrupts
from strata.benchmark_record import check_folder, record_path
from strata.cli.bench_options import KINDS, full_command, refuse_idle_options
from strata.cli.configure import Configure
from strata.cli.synthetic_bench import (
    SyntheticWords,
    bench_ready,
    run_synthetic,
    write_checkpoint,
    write_computed_pack,
)
from strata.errors import ConfigError
from strata.files import read_regular

if TYPE_CHECKING:
    from strata.benchmark_record import Record
    from strata.config import Requested

SYNTHETIC_TOKENS = 512
MOST_LEARNED = 1 << 20


def command(
    context: typer.Context,
    configure: Configure,
    what: Annotated[
        str, typer.Argument(metavar="kernels|cache|decode|prompt|ready|checkpoint|pack", help="What to measure.")
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="cache, decode, prompt, ready: the model; else the built-in one."),
    ] = None,
    gib: Annotated[float, typer.Option(help="kernels: GiB of distinct experts, each read once a pass.")] = 4.0,
    repeats: Annotated[int, typer.Option(min=1, help="kernels: passes; the best counts.")] = 5,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="cache: text whose picks are recorded; else Strata's own code.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="cache: tokens of it.")] = 4096,
    prompt: Annotated[int, typer.Option(min=1, help="decode, prompt: tokens of each fresh prompt.")] = 512,
    decode: Annotated[
        int | None, typer.Option(min=1, help="decode, prompt: tokens decoded after it; else 64, synthetic 512.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="decode, prompt, ready: how often; the median counts.")] = 3,
    measure: Annotated[
        bool, typer.Option("--measure", help="decode, prompt: measure this machine again for the forecast.")
    ] = False,
    synthetic: Annotated[
        str | None,
        typer.Option(metavar="SHAPE", help="decode, ready, checkpoint, pack: a computed model of a known shape."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="synthetic: its first layers alone.")] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="synthetic decode: skewed, independent, uniform, depth; may be repeated.")
    ] = None,
    learn: Annotated[
        int, typer.Option(min=64, max=MOST_LEARNED, help="synthetic: other tokens that the profile is learned on.")
    ] = 2048,
    dense: Annotated[str, typer.Option(metavar="q8_0|bf16|f32", help="synthetic: format of dense weights.")] = "q8_0",
    experts: Annotated[str, typer.Option(metavar="nvfp4|q8_0|bf16", help="synthetic: format of experts.")] = "nvfp4",
    weight_seed: Annotated[int, typer.Option(min=0, help="synthetic: what weights are computed from.")] = 1,
    profile: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="synthetic: writes a timeline of a few rounds, and draws it.")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="checkpoint, pack: where it is written.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="cache: draw hit rate against slots.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the record in FOLDER/<machine>/.")] = None,
    machine: Annotated[str, typer.Option(help="What this machine is called in a kept record.")] = "this-pc",
) -> int:
    """Measures this machine's kernels, what each cache policy would hit, or a model's speed beside its forecast."""
    if what not in KINDS:
        raise ConfigError(f"bench {what!r} is not known", f"use one of: {', '.join(KINDS)}")
    requested = configure(name)
    if what in ("checkpoint", "pack") and synthetic is None:
        raise ConfigError(f"bench {what} needs --synthetic SHAPE", f"strata bench {what} --synthetic SHAPE --to FOLDER")
    refuse_idle_options(context, what, synthetic, requested)
    if synthetic is not None:
        tokens = decode or SYNTHETIC_TOKENS
        words = SyntheticWords(
            synthetic, layers, arm or (), runs, tokens, learn, dense, experts, weight_seed, profile, out, machine
        )
        if what in ("checkpoint", "pack"):
            if to is None:
                raise ConfigError(f"bench {what} needs --to FOLDER", "name a folder that is not there yet")
            (write_checkpoint if what == "checkpoint" else write_computed_pack)(words, to)
            return 0
        print(run_synthetic(what, words, requested).line())
        return 0
    kept_as = what
    if out is not None:
        check_folder(record_path(out, machine, what).parent)
    if what == "cache":
        record = bench_cache(requested, text, tokens, plot)
    elif what == "ready":
        record, kept_as = bench_ready(requested, runs)
    elif what == "kernels":
        record = bench_kernels(requested, gib, repeats)
    else:
        record = bench_speed(requested, what, prompt, decode or 64, runs, measure)
    if out is not None:
        record.write(record_path(out, machine, kept_as))
    print(record.line())
    return 0


def bench_kernels(requested: Requested, gib: float, repeats: int) -> Record:
    from strata.kernels import bench

    interrupts.in_order()
    threads = None if isinstance(requested.threads, str) else requested.threads
    command = full_command(f"strata bench kernels --gib {gib:g} --repeats {repeats}", requested)
    record = bench.bench_kernels(gib=gib, threads=threads, repeats=repeats, command=command)
    print("\n".join(bench.describe(record)))
    return record


def bench_cache(requested: Requested, text: Path | None, tokens: int, plot: Path | None) -> Record:
    from strata.engine import cache_bench

    if plot is not None:  # before minutes of measuring
        cache_bench.check_drawing(plot)
    interrupts.in_order()
    table, record = cache_bench.bench_cache(
        requested, text=read_text(text), tokens=tokens,
        command=full_command(f"strata bench cache --tokens {tokens}", requested),
    )  # fmt: skip
    print("\n".join(table.lines()))
    if plot is not None:
        cache_bench.draw_cache(table, plot)
        print(f"drawn: {plot}")
    return record


def bench_speed(requested: Requested, what: str, prompt: int, decode: int, runs: int, measure: bool) -> Record:
    from strata.engine import speed_bench

    interrupts.in_order()
    bench, record = speed_bench.bench_speed(
        requested,
        "decode" if what == "decode" else "prompt",
        prompt=prompt,
        tokens=decode,
        runs=runs,
        measure=measure,
        command=full_command(f"strata bench {what} --prompt {prompt} --decode {decode} --runs {runs}", requested),
    )
    print("\n".join(bench.lines()))
    return record


def read_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return read_regular(path).decode()
    except UnicodeDecodeError as error:
        where = f"at byte {error.start:,}"
        raise ConfigError(f"--text {path} is not UTF-8 text {where}", "give a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read: {error.strerror}", "give a text file in UTF-8") from None
