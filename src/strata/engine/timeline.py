"""Where time goes, as spans on lanes: written for a trace viewer, summed by name, drawn as a picture.

Lives in ``engine`` because rounds and prompts are taken apart here; a card's launches and the CPU's calls are spans
alike. It measures nothing by itself but ``measure``, and must not know what a span stands for.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from strata import interrupts
from strata.errors import ConfigError
from strata.files import atomic_write

__all__ = ["Span", "Timeline"]

COLOURS = 10  # of matplotlib's cycle


@dataclass(frozen=True)
class Span:
    """``start`` and ``end`` in seconds on one clock of the timeline."""

    name: str
    start: float
    end: float
    lane: str


class Timeline:
    """Collects spans; one thread adds. ``marks`` are instants with a name (a round's beginning)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: list[tuple[str, float]] = []
        self._chained: set[str] = set()  # lanes with a clock of their own

    def span(self, name: str, start: float, end: float, lane: str) -> None:
        """A part of the work: ``start`` and ``end`` in seconds; spans of one lane do not overlap but may nest."""
        assert end >= start, (name, start, end)
        self.spans.append(Span(name, start, end, lane))

    def chain(self, parts: list[tuple[str, float]], start: float, lane: str) -> float:
        """Spans that follow one another, each (name, seconds), as a card's launches do; the end of the last."""
        self._chained.add(lane)
        for name, seconds in parts:
            self.span(name, start, start + seconds, lane)
            start += seconds
        return start

    @contextmanager
    def measure(self, name: str, lane: str) -> Iterator[None]:
        """A span around what runs inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.span(name, start, time.perf_counter(), lane)

    def mark(self, name: str) -> None:
        self.marks.append((name, time.perf_counter()))

    def totals(self, lane: str | None = None) -> dict[str, float]:
        """Seconds by name, largest first. Of a span that holds others both count."""
        sums: dict[str, float] = {}
        for one in self.spans:
            if lane is None or one.lane == lane:
                sums[one.name] = sums.get(one.name, 0.0) + one.end - one.start
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def counts(self, lane: str) -> Counter[str]:
        """Spans of a lane by name."""
        return Counter(one.name for one in self.spans if one.lane == lane)

    def lanes(self) -> list[str]:
        """In the order of their first span."""
        return list(dict.fromkeys(one.lane for one in self.spans))

    def write_trace(self, path: Path) -> None:
        """Writes Chrome's trace format (chrome://tracing, Perfetto): complete events in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes(), 1)}
        first = min((one.start for one in self.spans), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        for one in self.spans:
            begin, length = 1e6 * (one.start - first), 1e6 * (one.end - one.start)
            events.append(
                {"ph": "X", "name": one.name, "pid": 1, "tid": lanes[one.lane], "ts": round(begin, 3),
                 "dur": round(length, 3)}
            )  # fmt: skip
        for name, at in self.marks:
            events.append({"ph": "i", "s": "g", "name": name, "pid": 1, "tid": 1, "ts": round(1e6 * (at - first), 3)})
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def draw(self, path: Path, whole: str) -> None:
        """A PNG: spans by lane, and the sums by name of all lanes but ``whole``, which the others take apart.

        Raises ``ConfigError`` where matplotlib is not installed."""
        try:
            with interrupts.at_once():
                import_module("matplotlib").use("Agg")
                pyplot = import_module("matplotlib.pyplot")
        except ImportError as error:
            way = "pip install 'strata-moe[plot]' (or -e '.[plot]' in its folder)"
            raise ConfigError("a picture needs matplotlib, which is not installed", way) from error
        lanes = self.lanes()
        sums = Counter[str]()
        for lane in lanes:
            if lane != whole or len(lanes) == 1:
                sums.update(self.totals(lane))
        parts = dict(sums.most_common())
        zero = min((one.start for one in self.spans if one.lane not in self._chained), default=0.0)
        latest = max((one.end for one in self.spans if one.lane not in self._chained), default=zero)
        colour = {name: f"C{number % COLOURS}" for number, name in enumerate(self.totals())}
        heights = [1.0] * len(lanes) + [0.3 + 0.24 * min(16, len(parts))]
        figure, axes = pyplot.subplots(
            len(heights), 1, figsize=(11, 1 + 1.2 * sum(heights)), height_ratios=heights, squeeze=False
        )
        for lane, row in zip(lanes, axes[:-1, 0], strict=True):
            spans = [one for one in self.spans if one.lane == lane]
            first = spans[0].start if lane in self._chained else zero
            places = [(1e3 * (one.start - first), 1e3 * (one.end - one.start)) for one in spans]
            row.broken_barh(places, (0, 1), facecolors=[colour[one.name] for one in spans])
            if lane not in self._chained:
                row.set_xlim(0, 1e3 * (latest - zero))
            row.set(yticks=[], ylabel=lane.replace(", ", "\n"), xlabel="ms")
        bottom = axes[-1, 0]
        shown = list(parts.items())[:16][::-1]
        bottom.barh([name for name, _ in shown], [1e3 * seconds for _, seconds in shown],
                    color=[colour[name] for name, _ in shown])  # fmt: skip
        bottom.set(xlabel="ms in all")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
