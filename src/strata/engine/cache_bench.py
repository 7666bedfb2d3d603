"""``strata bench cache``: records which experts a text picks, and plays every policy against numbers of slots.

Lives in ``engine`` because it runs a model to record its picks; the policies and their simulation are ``experts``'.
It moves no expert: a hit rate is a property of picks and policy, not of a machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import strata
from strata import interrupts
from strata.benchmark_record import Figure, Record
from strata.engine.models import OpenModel, open_model
from strata.engine.runtime import Runtime
from strata.errors import ConfigError
from strata.experts.policy_simulation import POLICIES, CacheRun, count_picks, simulate
from strata.experts.profile import ExpertProfile, find_profile
from strata.kernels.bench import machine

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.experts.policy import Heat
    from strata.experts.policy_simulation import Trace
    from strata.kernels.ops import ExpertExecutor

__all__ = ["CacheTable", "RecordedPicks", "bench_cache", "check_drawing", "draw_cache", "own_text", "record_trace"]

SHARES = (5, 10, 20, 30, 40, 50, 75)  # percent of all experts that have a slot
TITLES = {"profile": "profile", "lru": "LRU", "decayed": "decayed counts", "clairvoyant": "clairvoyant"}


class RecordedPicks:
    """An executor that keeps the ids it is called with, and lets another compute."""

    def __init__(self, experts: ExpertExecutor) -> None:
        self._experts = experts
        self.ids: dict[int, list[torch.Tensor]] = {}

    def __call__(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        self.ids.setdefault(layer, []).append(ids_TK.clone())
        return self._experts(layer, x_TH, ids_TK, weights_TK)

    def trace(self) -> Trace:
        """[rows, layers, top_k], a row being one decode round of a text that is written token by token."""
        layers = [torch.cat(self.ids[layer]) for layer in sorted(self.ids)]
        return torch.stack(layers, 1).numpy().astype(np.int64)


def record_trace(runtime: Runtime, texts: Sequence[Sequence[int]]) -> Trace:
    """The picks of every row of ``texts``, each read as a sequence of its own (at most a context long)."""
    recorded = RecordedPicks(runtime.experts)
    for ids in texts:
        state = runtime.model.new_state(len(ids), runtime.kv)
        for start in range(0, len(ids), runtime.chunk_rows):
            part = list(ids[start : start + runtime.chunk_rows])
            runtime.model.forward(runtime.ops, part, state, recorded, "none", certain=True)
            state.commit(len(part))
    return recorded.trace()


def own_text() -> str:
    """Strata's own Python files, as text that every installation has and no model was trained on."""
    folder = Path(strata.__file__).parent
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


@dataclass(frozen=True)
class CacheTable:
    """``runs[policy][i]`` is that policy with ``slots[i]`` slots of ``total`` experts. ``learned`` says where the
    profile comes from."""

    total: int
    slots: tuple[int, ...]
    runs: dict[str, list[CacheRun]]
    rounds: int
    learned: str

    def lines(self) -> list[str]:
        """The table for people."""
        head = f"{'slots':>14}" + "".join(f"{TITLES[name]:>16}" for name in self.runs)
        found = [f"hit rate over {self.rounds:,} rounds of text; profile: {self.learned}", head]
        for at, slots in enumerate(self.slots):
            share = f"{slots:,} ({100 * slots / self.total:.0f} %)"
            cells = "".join(f"{100 * runs[at].hit_rate:>14.1f} %" for runs in self.runs.values())
            found.append(f"{share:>14}{cells}")
        return found

    def figures(self) -> dict[str, Figure]:
        figures = {}
        for name, runs in self.runs.items():
            for slots, run in zip(self.slots, runs, strict=True):
                rate = round(100 * run.hit_rate, 2)
                figures[f"hit_rate_{name}_{round(100 * slots / self.total)}"] = Figure(rate, "%", routing="text")
                loads = round(run.loads / self.rounds, 3)
                figures[f"loads_{name}_{round(100 * slots / self.total)}"] = Figure(loads, "experts/token")
        return figures


def bench_cache(
    requested: Requested, *, text: str | None = None, tokens: int = 4096, command: str = "strata bench cache"
) -> tuple[CacheTable, Record]:
    """Records ``tokens`` tokens of ``text`` (None: ``own_text``) and simulates every policy.

    A pack with a profile is simulated over all of them; for one without, the first half is the profile's text and the
    second half is simulated. Raises ``ConfigError`` for a text that is too short.
    """
    model = open_model(requested.model)
    try:
        # Picks are recorded where every layer's can be looked at: on the CPU, whatever computes otherwise.
        runtime = Runtime.open(model, replace(requested, device="cpu"))
        try:
            trace = record_trace(runtime, _cut(model, text, tokens, runtime.max_context))
        finally:
            runtime.close()
        heat, trace, learned = _profile(model, trace, requested.adapt_every)
        table = simulate_all(trace, heat, learned, requested.adapt_every, requested.adapt_swaps)
        details = {"model": model.reader.folder.name, "rounds": table.rounds, "profile": learned}
        return table, Record(command, machine() | details, table.figures())
    finally:
        model.close()


def simulate_all(trace: Trace, heat: Heat, learned: str, adapt_every: int, adapt_swaps: int) -> CacheTable:
    slots = tuple(sorted({max(1, heat.size * share // 100) for share in SHARES}))
    runs = {
        name: [simulate(name, trace, heat, n, adapt_every=adapt_every, adapt_swaps=adapt_swaps) for n in slots]
        for name in POLICIES
    }
    return CacheTable(heat.size, slots, runs, len(trace), learned)


def check_drawing(path: Path) -> None:
    """Raises ``ConfigError`` where matplotlib is not installed or there is no folder for the picture."""
    try:
        import_module("matplotlib").use("Agg")
    except ImportError as error:
        way = f"{sys.executable} -m pip install 'strata-moe[plot]' (or -e '.[plot]' in its folder)"
        raise ConfigError("--plot needs matplotlib, which is not installed", way) from error
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}", "make it first")


def draw_cache(table: CacheTable, path: Path) -> None:
    """Hit rate against slots as a PNG. Raises as ``check_drawing``."""
    check_drawing(path)
    with interrupts.at_once():
        pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    shares = [100 * slots / table.total for slots in table.slots]
    for name, runs in table.runs.items():
        axes.plot(shares, [100 * run.hit_rate for run in runs], marker="o", label=TITLES[name])
    axes.plot(shares, shares, color="0.7", linestyle=":", label="uniform picks")
    axes.set(xlabel="slots, % of all experts", ylabel="hit rate, %", xlim=(0, 100), ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cut(model: OpenModel, text: str | None, tokens: int, context: int) -> list[list[int]]:
    ids = model.text.tokenizer.encode(own_text() if text is None else text)[:tokens]
    if len(ids) < 64:
        raise ConfigError(f"the text has {len(ids)} tokens, a simulation needs 64", "give a longer --text")
    return [ids[start : start + context] for start in range(0, len(ids), context)]


def _profile(model: OpenModel, trace: Trace, adapt_every: int) -> tuple[Heat, Trace, str]:
    """(heat of the layers of the trace, the rounds to simulate, where the heat comes from)."""
    layers, experts = trace.shape[1], model.reader.num_experts
    reader = model.reader
    kept = find_profile(reader.folder, reader.digest, len(reader.expert_layers), experts)
    if kept is not None:
        return kept.heat(adapt_every)[:layers], trace, "of the pack"
    half = len(trace) // 2
    learned = ExpertProfile(half, count_picks(trace[:half], experts))
    return learned.heat(adapt_every), trace[half:], "learned from the text's first half"
