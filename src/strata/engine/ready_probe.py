"""From a process's start to the first round possible, in a process of its own: what ``strata bench ready`` measures.

Lives in ``engine`` because it opens a model as any command does. Everything heavy is imported inside, so that imports
are timed apart from planning, taking memory and filling it. It must not know what a tier is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import EngineError

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.engine.synthetic_bench import SyntheticCase

__all__ = ["ReadyRun", "main", "probe_ready"]

LIMIT_SECONDS = 8 * 60
_PROGRAM = "from strata.engine.ready_probe import main; main()"


@dataclass(frozen=True)
class ReadyRun:
    """Seconds since the process was started: when imports were done, when the first round was possible, when it was
    done. ``held``: bytes of experts that were filled; ``dense``: of dense weights."""

    imports: float
    ready: float
    first_round: float
    held: float
    dense: float
    on_card: bool


def probe_ready(case: SyntheticCase, requested: Requested) -> ReadyRun:
    """One process that opens the skewed model and runs one round. Raises ``EngineError`` with its last line."""
    flags = {
        name: _plain(getattr(requested, name)) for name, origin in requested.origins.items() if origin != "default"
    }
    words = {
        "began": time.time(), "shape": case.shape, "num_layers": case.num_layers, "seed": case.weights.seed,
        "experts": case.weights.experts, "dense": case.weights.dense, "flags": flags,
    }  # fmt: skip
    command = [sys.executable, "-c", _PROGRAM, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"the process that was to get ready ended with {done.returncode}: {last}")
    return ReadyRun(**json.loads(lines[-1]))


def _plain(value: object) -> object:
    from strata.option_values import format_value

    return value if isinstance(value, bool) else format_value(value)


def main() -> None:
    """The child's whole run; its last line is a ``ReadyRun``."""
    words: Mapping[str, object] = json.loads(sys.argv[1])
    from strata.checkpoint.synthetic_reader import SyntheticWeights
    from strata.config_sources import resolve_here
    from strata.engine.runtime import Runtime
    from strata.engine.session import Session
    from strata.engine.synthetic_model import open_synthetic

    began = float(str(words["began"]))
    imports = time.time() - began
    flags = words["flags"]
    assert isinstance(flags, dict)
    requested = resolve_here(command_line=flags)
    layers = words["num_layers"]
    weights = SyntheticWeights(seed=words["seed"], experts=words["experts"], dense=words["dense"])  # type: ignore[arg-type]
    model = open_synthetic(str(words["shape"]), None if layers is None else int(str(layers)), weights)
    runtime = Runtime.open(model, requested)
    session = Session(runtime)
    ready = time.time() - began
    session.round([1])
    first_round = time.time() - began
    found = runtime.statistics().experts
    held = (found.experts_in_vram + found.experts_in_ram) * runtime.plan.shape.blob_bytes
    line = json.dumps(vars(ReadyRun(imports, ready, first_round, held, model.reader.dense_bytes,
                                    runtime.rounds is not None)))  # fmt: skip
    runtime.close()
    model.close()
    print(line)
