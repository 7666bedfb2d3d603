"""The synthetic half of ``strata bench``: arms of a computed model, their figures kept in one record.

Lives in ``cli``; measuring is ``engine.synthetic_bench``'s. Every call ends in one JSON line, and an arm's figures are
kept as soon as it ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata import interrupts
from strata.benchmark_record import Figure, Record, check_folder, read_kept, record_path, written_to
from strata.cli.bench_options import full_command
from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.config import Requested
    from strata.engine.ready_probe import ReadyRun
    from strata.engine.synthetic_bench import SyntheticCase
    from strata.engine.timeline import Timeline

__all__ = ["SyntheticWords", "bench_ready", "run_synthetic", "write_checkpoint", "write_computed_pack"]

LONG_CONTEXT = 40960  # figures of a longer one say so in their name
PROFILED_ROUNDS = 8
SHOWN_PARTS = 16


@dataclass(frozen=True)
class SyntheticWords:
    """What the command line says beside the options that every model has."""

    shape: str
    layers: int | None
    arms: Sequence[str]
    runs: int
    tokens: int
    learn: int
    dense: str
    experts: str
    seed: int
    profile: Path | None
    out: Path | None
    machine: str

    def command(self, what: str) -> str:
        """As a user writes it, without what every model has."""
        layers = "" if self.layers is None else f" --layers {self.layers}"
        said = f"strata bench {what} --synthetic {self.shape}{layers} --runs {self.runs}"
        if what == "decode":
            said += f" --decode {self.tokens} --learn {self.learn}" + "".join(f" --arm {arm}" for arm in self.arms)
        return f"{said} --dense {self.dense} --experts {self.experts} --weight-seed {self.seed}"

    def case(self) -> SyntheticCase:
        """Raises ``ConfigError`` for formats and shapes that there are not."""
        from strata.checkpoint.pack_writer import PackOptions
        from strata.checkpoint.synthetic_reader import SyntheticWeights
        from strata.engine.synthetic_bench import SyntheticCase
        from strata.models.synthetic_shapes import synthetic_config

        interrupts.in_order()
        synthetic_config(self.shape, self.layers)
        options = PackOptions(experts=self.experts, dense=self.dense)  # type: ignore[arg-type]
        weights = SyntheticWeights(seed=self.seed, experts=options.experts, dense=options.dense)
        return SyntheticCase(self.shape, self.layers, weights, self.tokens, self.learn, self.runs)


def run_synthetic(what: str, words: SyntheticWords, requested: Requested) -> Record:
    """Measures the arms asked for; the record of the last one holds all their figures."""
    case = words.case()
    if words.out is not None:  # before minutes of measuring
        check_folder(record_path(words.out, words.machine, what).parent)
        for on_card in (True, False):
            read_kept(_kept_at(words.out, words.machine, case, requested, on_card=on_card))
    if words.profile is not None:
        check_folder(words.profile)
    record = (_decode if what == "decode" else _ready)(case, words, requested)
    if words.profile is not None:
        _profile(case, words.profile, requested)
    return record


def _decode(case: SyntheticCase, words: SyntheticWords, requested: Requested) -> Record:
    from strata.engine.synthetic_bench import find_arms, run_decode_arms

    figures: dict[str, Figure] = {}
    counts: dict[str, object] = {}
    record = None
    for found in run_decode_arms(case, find_arms(words.arms), requested):
        arm = found.arm
        figures[_name(arm.figure, found.figure)] = found.figure
        said = _name(arm.name, found.figure)
        if found.routing is not None:
            counts[said] = {name: value for name, value in vars(found.routing).items() if value is not None}
        counts[f"{said}_memory"] = found.memory.as_details()
        record = _record(case, words, requested, "decode", figures, counts, on_card=found.on_card)
    assert record is not None
    return record


def _ready(case: SyntheticCase, words: SyntheticWords, requested: Requested) -> Record:
    from strata.engine.ready_probe import ready_figures

    runs = _probe(case, requested, words.runs)
    figures = ready_figures(runs, vram_gib=requested.vram_gib, kv=str(requested.kv), dense=words.dense)
    details = {
        "ready_from": "weights computed in place, nothing read from a drive",
        "ready_filled_gb": round((runs[0].held + runs[0].dense) / 1e9, 2),
    } | runs[-1].as_details()
    return _record(case, words, requested, "ready", figures, details, on_card=runs[0].on_card)


def bench_ready(requested: Requested, runs: int) -> tuple[Record, str]:
    """Of a model in files, the page cache dropped before each run; the drive's own rate is the faster of one before the
    first and one after the last. The record, and the name that it is kept under."""
    from strata.engine.models import open_model
    from strata.engine.ready_probe import measure_drive, ready_figures
    from strata.kernels.bench import machine

    interrupts.in_order()
    opened = open_model(requested.model)
    folder = opened.reader.folder
    opened.close()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    drive = measure_drive(files)
    found = _probe(None, requested, runs, files)
    drive = max(drive, measure_drive(files))
    read = found[0].read
    print(f"the drive gives {drive / 1e9:.2f} GB/s: {read / 1e9:.2f} GB take it {read / drive:.2f} s")
    figures = ready_figures(found, drive, vram_gib=requested.vram_gib, kv=str(requested.kv))
    details = {
        "ready_from": "files, the page cache dropped before each run", "ready_read_gb": round(read / 1e9, 2),
        "drive_gb_per_s": round(drive / 1e9, 2),
    } | found[-1].as_details()  # fmt: skip
    command = full_command(f"strata bench ready {opened.name} --runs {runs}", requested)
    name = re.sub(r"[^a-z0-9]+", "-", opened.name.lower()).strip("-")
    return Record(command, machine() | details, figures), f"ready-{name}"


def _probe(case: SyntheticCase | None, requested: Requested, count: int, files: Sequence[Path] = ()) -> list[ReadyRun]:
    """``count`` runs, each with nothing of ``files`` in the page cache; says each."""
    from strata.engine.ready_probe import probe_ready
    from strata.memory.file_rate import drop_caches

    runs = []
    for _ in range(count):
        drop_caches(files)
        runs.append(probe_ready(case, requested))
        print("\n".join(runs[-1].lines()))
    return runs


def _name(name: str, figure: Figure) -> str:
    context = figure.max_context or 0
    return name if context <= LONG_CONTEXT or name.endswith("_over_1k") else f"{name}_context{context // 1024}k"


def _record(
    case: SyntheticCase,
    words: SyntheticWords,
    requested: Requested,
    what: str,
    figures: Mapping[str, Figure],
    details: Mapping[str, object],
    *,
    on_card: bool,
) -> Record:
    """The record so far, written at once where it is to be kept."""
    from strata.kernels.bench import machine

    command = full_command(words.command(what), requested)
    facts = {"weights": f"computed from seed {words.seed}", "experts": words.experts, "tokens": words.tokens}
    record = Record(command, machine() | facts | dict(details), dict(figures))
    if words.out is not None:
        record.merge_into(_kept_at(words.out, words.machine, case, requested, on_card=on_card))
    return record


def _kept_at(out: Path, machine: str, case: SyntheticCase, requested: Requested, *, on_card: bool) -> Path:
    from strata.engine.synthetic_bench import results_name

    return record_path(out, machine, results_name(case, requested, on_card=on_card))


def _profile(case: SyntheticCase, folder: Path, requested: Requested) -> None:
    from strata.engine.profile_bench import profile_synthetic

    found = profile_synthetic(case, requested, PROFILED_ROUNDS)
    said = f"timeline of {found.rounds} rounds", f"timeline of a prompt of {found.prompt_tokens} tokens"
    _write_timeline(found.decode, folder, f"{case.shape}-decode", said[0])
    _write_timeline(found.prompt, folder, f"{case.shape}-prompt", said[1])


def _write_timeline(timeline: Timeline, folder: Path, name: str, said: str) -> None:
    """Trace and picture of ``name``, and where most of the time went, lane by lane."""
    from strata.engine.round_profile import ROUNDS_LANE

    trace, picture = folder / f"{name}.trace.json", folder / f"{name}.png"
    with written_to(folder):
        timeline.write_trace(trace)
    print(f"{said}: {trace.name}")
    for lane in timeline.lanes():
        totals, counts = timeline.totals(lane), timeline.counts(lane)
        print(f"{lane}: {1e3 * sum(totals.values()):.3f} ms, of it")
        for part, seconds in list(totals.items())[:SHOWN_PARTS]:
            print(f"  {part:<28}{counts[part]:6,} x {1e6 * seconds / counts[part]:10.1f} us{1e3 * seconds:11.3f} ms")
        rest = sum(list(totals.values())[SHOWN_PARTS:])
        if rest:
            print(f"  {'all others':<49}{1e3 * rest:11.3f} ms")
    try:
        with written_to(folder):
            timeline.draw(picture, ROUNDS_LANE)
        print(f"drawn: {picture.name}")
    except ConfigError as error:
        print(f"not drawn: {error}")


def write_computed_pack(words: SyntheticWords, destination: Path) -> None:
    """Writes the computed model as a pack."""
    from strata.engine.synthetic_model import write_synthetic_pack

    case = words.case()
    folder = write_synthetic_pack(case.shape, case.num_layers, case.weights, destination)
    print(f"written: {folder.name}, {sum(path.stat().st_size for path in folder.iterdir()) / 1e9:.2f} GB as a pack")


def write_checkpoint(words: SyntheticWords, destination: Path) -> None:
    """Writes the computed model as a checkpoint in BF16 for other engines and for ``strata pack``."""
    from strata.checkpoint.export import export_reader

    model = words.case().open("skewed")
    try:
        folder = export_reader(model.reader, destination)
    finally:
        model.close()
    print(f"written: {folder.name}, {sum(path.stat().st_size for path in folder.iterdir()) / 1e9:.2f} GB in BF16")
