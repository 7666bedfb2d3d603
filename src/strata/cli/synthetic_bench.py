"""The synthetic half of ``strata bench``: arms of a computed model, their figures kept in one record.

Lives in ``cli``; measuring is ``engine.synthetic_bench``'s. Every call ends in one JSON line, and an arm's figures are
kept as soon as it ends.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.benchmark_record import Figure, Record, record_path
from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.config import Requested
    from strata.engine.synthetic_bench import SyntheticCase

__all__ = ["SyntheticWords", "run_synthetic", "write_checkpoint"]

LONG_CONTEXT = 40960  # figures of a longer one say so in their name
PROFILED_ROUNDS = 8


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

    def case(self) -> SyntheticCase:
        """Raises ``ConfigError`` for formats and shapes that there are not."""
        from strata.checkpoint.pack_writer import PackOptions
        from strata.checkpoint.synthetic_reader import SyntheticWeights
        from strata.engine.synthetic_bench import SyntheticCase
        from strata.models.synthetic_shapes import synthetic_config

        synthetic_config(self.shape, self.layers)
        options = PackOptions(experts=self.experts, dense=self.dense)  # type: ignore[arg-type]
        weights = SyntheticWeights(seed=self.seed, experts=options.experts, dense=options.dense)
        return SyntheticCase(self.shape, self.layers, weights, self.tokens, self.learn, self.runs)


def run_synthetic(what: str, words: SyntheticWords, requested: Requested) -> Record:
    """Measures the arms asked for; the record of the last one holds all their figures."""
    case = words.case()
    if what == "decode":
        record = _decode(case, words, requested)
    elif what == "ready":
        record = _ready(case, words, requested)
    else:
        raise ConfigError(f"bench {what} has no --synthetic", "use decode, ready or checkpoint")
    if words.profile is not None:
        _profile(case, words.profile, requested)
    return record


def _decode(case: SyntheticCase, words: SyntheticWords, requested: Requested) -> Record:
    from strata.engine.synthetic_bench import find_arms, run_decode_arm

    figures: dict[str, Figure] = {}
    counts: dict[str, object] = {}
    record = None
    for arm in find_arms(words.arms):
        print(f"-- {words.shape}: {arm.name}")
        found = run_decode_arm(case, arm, requested)
        figures[_name(arm.figure, found.figure)] = found.figure
        if found.routing is not None:
            counts[arm.name] = {name: value for name, value in vars(found.routing).items() if value is not None}
        record = _record(case, words, requested, "decode", figures, counts, on_card=found.on_card)
    assert record is not None
    return record


def _ready(case: SyntheticCase, words: SyntheticWords, requested: Requested) -> Record:
    from strata.engine.ready_probe import probe_ready

    runs = [probe_ready(case, requested) for _ in range(words.runs)]
    filled = (runs[0].held + runs[0].dense) / 1e9
    for run in runs:
        print(
            f"ready in {run.ready:.2f} s, of which imports {run.imports:.2f} s; first round done at "
            f"{run.first_round:.2f} s; {filled:.1f} GB computed, none read from a drive"
        )
    figures = {}
    for name, values in (("ready_s", [run.ready for run in runs]), ("imports_s", [run.imports for run in runs])):
        median = round(statistics.median(values), 3)
        figures[name] = Figure(
            median, "s", min=round(min(values), 3), max=round(max(values), 3), runs=len(values),
            vram_gib=requested.vram_gib, kv=str(requested.kv), dense=words.dense,
        )  # fmt: skip
    details = {
        "ready_from": "weights computed in place, nothing read from a drive",
        "ready_filled_gb": round(filled, 2),
    }
    return _record(case, words, requested, "ready", figures, details, on_card=runs[0].on_card)


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
    from strata.engine.synthetic_bench import results_name
    from strata.kernels.bench import machine

    layers = "" if words.layers is None else f" --layers {words.layers}"
    command = f"strata bench {what} --synthetic {words.shape}{layers}"
    facts = {"weights": f"computed from seed {words.seed}", "experts": words.experts, "tokens": words.tokens}
    record = Record(command, machine() | facts | dict(details), dict(figures))
    if words.out is not None:
        record.merge_into(record_path(words.out, words.machine, results_name(case, requested, on_card=on_card)))
    return record


def _profile(case: SyntheticCase, folder: Path, requested: Requested) -> None:
    from strata.engine.synthetic_bench import profile_decode

    timeline = profile_decode(case, requested, PROFILED_ROUNDS)
    trace, picture = folder / f"{case.shape}-decode.trace.json", folder / f"{case.shape}-decode.png"
    timeline.write_trace(trace)
    print(f"timeline of {PROFILED_ROUNDS} rounds: {trace.name}; ms a round by part (rounds hold the others):")
    for name, seconds in list(timeline.totals().items())[:12]:
        print(f"  {name:<24}{1e3 * seconds / PROFILED_ROUNDS:9.3f}")
    try:
        timeline.draw(picture)
        print(f"drawn: {picture.name}")
    except ConfigError as error:
        print(f"not drawn: {error}")


def write_checkpoint(words: SyntheticWords, destination: Path) -> None:
    """Writes the computed model as a checkpoint in BF16 for other engines and for ``strata pack``."""
    from strata.checkpoint.export import export_reader

    model = words.case().open("skewed")
    try:
        folder = export_reader(model.reader, destination)
    finally:
        model.close()
    print(f"written: {folder.name}, {sum(path.stat().st_size for path in folder.iterdir()) / 1e9:.2f} GB in BF16")
