"""From a process's start to the first round possible, in a process of its own: what ``strata bench ready`` measures.

Lives in ``engine`` because it opens a model as any command does. Everything heavy is imported inside, so that imports
are timed apart from planning, taking memory and filling it. A pack is read with the page cache dropped before. It must
not know what a tier is.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata import collector
from strata.errors import CheckpointError, ConfigError, EngineError, MemoryPlanError, StrataError, lacks_memory
from strata.stages import Stage, format_stages

if TYPE_CHECKING:
    from strata.benchmark_record import Figure
    from strata.config import Requested
    from strata.engine.models import OpenModel
    from strata.engine.synthetic_bench import SyntheticCase

__all__ = ["ReadyRun", "main", "measure_drive", "probe_ready", "ready_figures"]

LIMIT_SECONDS = 8 * 60
DRIVE_BYTES = 4 << 30  # read at most for the drive's own rate
GIGA = 1e9
FAILED = "failed: "
_KINDS: Mapping[str, type[StrataError]] = {one.__name__: one for one in (ConfigError, CheckpointError, MemoryPlanError)}
_PROGRAM = "from strata.engine.ready_probe import main; main()"


@dataclass(frozen=True)
class ReadyRun:
    """Seconds since the process was started: when imports were done, when the first round was possible, when it was
    done; ``load``: of them those of planning, taking memory and filling it. ``held``: bytes of experts that were
    filled; ``dense``: of dense weights; ``read``: bytes read from files, 0 where weights are computed. ``torch``: of
    the imports that of torch; ``bytecode``: whether Python had its bytecode. ``stages``: of the load. ``memory``: what
    was taken, as lines and as a record's details (``memory_use``)."""

    imports: float
    torch: float
    bytecode: bool
    ready: float
    first_round: float
    load: float
    held: float
    dense: float
    read: float
    on_card: bool
    stages: tuple[Stage, ...]
    memory: tuple[str, ...]
    details: Mapping[str, float]

    def lines(self) -> list[str]:
        source = (
            f"{self.read / GIGA:.1f} GB read" if self.read else f"{(self.held + self.dense) / GIGA:.1f} GB computed"
        )
        said = f"ready in {self.ready:.2f} s, of which imports {self.imports:.2f} s and the load {self.load:.2f} s"
        compiled = "" if self.bytecode else " (compiled from source, Python kept no bytecode of it)"
        stages = f"seconds: import of torch {self.torch:.2f}{compiled}; of the load {format_stages(self.stages)}"
        return [f"{said}; first round done at {self.first_round:.2f} s; {source}", stages, *self.memory]

    def as_details(self) -> dict[str, object]:
        """For a record: the import of torch, and begin and end of each stage in seconds since the load began."""
        spans = {stage.name: [round(stage.begin, 3), round(stage.end, 3)] for stage in self.stages}
        torch = {"ready_torch_s": round(self.torch, 3), "ready_torch_bytecode": self.bytecode}
        return torch | {"ready_stages": spans, "ready_memory": self.details}


def probe_ready(case: SyntheticCase | None, requested: Requested) -> ReadyRun:
    """One process that opens the skewed computed model, or for no ``case`` the one that was asked for, and runs one
    round. Raises ``EngineError`` with its last line."""
    flags = {
        name: _plain(getattr(requested, name)) for name, origin in requested.origins.items() if origin != "default"
    }
    words: dict[str, object] = {"began": time.time(), "flags": flags}
    if case is not None:
        words |= {
            "shape": case.shape, "num_layers": case.num_layers, "seed": case.weights.seed,
            "experts": case.weights.experts, "dense": case.weights.dense,
        }  # fmt: skip
    command = [sys.executable, "-c", _PROGRAM, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode and lines and lines[-1].startswith(FAILED):
        kind, message, hint = json.loads(lines[-1].removeprefix(FAILED))
        raise _KINDS.get(kind, EngineError)(message, hint)
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"the process that was to get ready ended with {done.returncode}: {last}")
    found = json.loads(lines[-1])
    stages = tuple(Stage(*one) for one in found["stages"])
    return ReadyRun(**(found | {"memory": tuple(found["memory"]), "stages": stages}))


def ready_figures(runs: Sequence[ReadyRun], drive: float | None = None, **facts: object) -> dict[str, Figure]:
    """Medians of the runs; with ``drive`` (bytes a second) also the load over what reading its bytes takes."""
    from strata.benchmark_record import Figure

    values = {name: ([getattr(run, name) for run in runs], "s") for name in ("ready", "imports", "load")}
    named = {f"{name}_s": value for name, value in values.items()}
    if any(run.details["lock_gib_per_s"] for run in runs):
        named["page_lock_rate"] = ([run.details["lock_gib_per_s"] for run in runs], "GiB/s")
    if drive is not None:
        named["load_over_drive"] = ([run.load * drive / run.read for run in runs], "ratio")
    return {
        name: Figure(
            round(statistics.median(found), 3), unit, min=round(min(found), 3), max=round(max(found), 3),
            runs=len(found), **facts,  # type: ignore[arg-type]
        )
        for name, (found, unit) in named.items()
    }  # fmt: skip


def measure_drive(files: Sequence[Path]) -> float:
    """Bytes a second that the drive gives for these files, the faster of reading through the page cache and past it.
    Afterwards the page cache holds nothing of them."""
    from strata.memory.file_rate import drop_caches, read_rate

    drop_caches(files)
    rate = max(read_rate(files, DRIVE_BYTES, direct=direct) for direct in (False, True))
    drop_caches(files)
    return rate


def _plain(value: object) -> object:
    from strata.option_values import format_value

    return value if isinstance(value, bool) else format_value(value)


def main() -> None:
    """The child's whole run; its last line is a ``ReadyRun``, or the named error that ended it."""
    try:
        _run()
    except StrataError as error:
        print(FAILED + json.dumps([type(error).__name__, error.message, error.hint]))
        raise SystemExit(1) from None
    except (MemoryError, OSError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        told = f"not enough memory: {' '.join(str(error).split())}"
        print(
            FAILED
            + json.dumps(["EngineError", told, "raise its limit (ulimit -v, ulimit -d), or close other programs"])
        )
        raise SystemExit(1) from None


def _run() -> None:
    words: Mapping[str, object] = json.loads(sys.argv[1])
    collector.pause()  # as the program's own start, here and below
    from strata.config_sources import resolve_here
    from strata.engine.early_card import open_card_early

    flags = words["flags"]
    assert isinstance(flags, dict)
    requested = resolve_here(command_line=flags)
    with open_card_early(requested):
        bytecode = _has_bytecode("torch")
        before = time.perf_counter()
        import torch  # noqa: F401 - first of what is heavy, to be timed apart

        _get_ready(words, requested, time.perf_counter() - before, bytecode)


def _has_bytecode(package: str) -> bool:
    """Whether Python finds the first module of a package compiled. Where it may not write (PYTHONDONTWRITEBYTECODE) and
    an installer did not either, each start compiles torch from source, longer than all else of the import."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.cached is not None and Path(spec.cached).exists()


def _get_ready(words: Mapping[str, object], requested: Requested, torch_seconds: float, bytecode: bool) -> None:
    """Ends with the line that the parent reads."""
    from strata.engine.runtime import Runtime
    from strata.engine.session import Session

    collector.resume()
    began = float(str(words["began"]))
    imports = time.time() - began
    with _open(words, requested) as model:
        runtime = Runtime.open(model, requested)
        session = Session(runtime)
        ready = time.time() - began
        session.round([1])
        first_round = time.time() - began
        use, found = runtime.memory_use(), runtime.statistics()
        held = (found.experts.experts_in_vram + found.experts.experts_in_ram) * runtime.plan.shape.blob_bytes
        dense = model.reader.dense_bytes
        read = found.experts.loaded_bytes + dense if "shape" not in words else 0
        run = ReadyRun(
            imports, torch_seconds, bytecode, ready, first_round, found.ready_seconds, held, dense, read,
            runtime.rounds is not None, runtime.stages, tuple(use.lines()), use.as_details(),
        )  # fmt: skip
        runtime.close()
    print(json.dumps(vars(run)))


@contextmanager
def _open(words: Mapping[str, object], requested: Requested) -> Iterator[OpenModel]:
    if "shape" in words:
        from strata.checkpoint.synthetic_reader import SyntheticWeights
        from strata.engine.synthetic_model import open_synthetic

        layers = words["num_layers"]
        weights = SyntheticWeights(seed=words["seed"], experts=words["experts"], dense=words["dense"])  # type: ignore[arg-type]
        model = open_synthetic(str(words["shape"]), None if layers is None else int(str(layers)), weights)
    else:
        from strata.engine.models import open_model

        model = open_model(requested.model)
    try:
        yield model
    finally:
        model.close()
