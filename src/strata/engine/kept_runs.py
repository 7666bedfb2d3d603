"""Runs of a benchmark's arms, kept as they end, so that a stopped benchmark goes on where it was.

Lives in ``engine`` beside the benchmarks with arms; the figures made of the runs are ``benchmark_record``'s. Runs count
together only where model, settings, machine and commit are the same. It must not know what was measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strata.benchmark_record import LARGEST, written_to
from strata.errors import ConfigError
from strata.files import atomic_write, read_regular

__all__ = ["KeptRuns"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptRuns:
    """The file of one key in ``folder``. A run is a flat table of numbers; ``is_whole`` says whether one has what is to
    be made of it."""

    folder: Path
    key: Mapping[str, object]
    is_whole: Callable[[Mapping[str, float]], bool] = field(default=lambda _: True, compare=False)

    @property
    def path(self) -> Path:
        words = json.dumps(dict(self.key), sort_keys=True, default=str)
        return self.folder / f"runs-{hashlib.sha256(words.encode()).hexdigest()[:12]}.json"

    def read(self, arm: str) -> list[dict[str, float]]:
        """The runs of an arm so far; none where there is no file of this key. Raises ``ConfigError`` where it cannot be
        read."""
        found = self._table().get(arm, [])
        return [dict(run) for run in found]

    def add(self, arm: str, run: Mapping[str, float]) -> None:
        """Keeps one more run, at once."""
        table = self._table()
        table.setdefault(arm, []).append(dict(run))
        with written_to(self.folder), atomic_write(self.path, "w") as file:
            json.dump({"key": dict(self.key), "arms": table}, file, indent=1, default=str)

    def forget(self, arm: str) -> None:
        """An arm that is to be measured anew."""
        table = self._table()
        if table.pop(arm, None) is not None:
            with atomic_write(self.path, "w") as file:
                json.dump({"key": dict(self.key), "arms": table}, file, indent=1, default=str)

    def _table(self) -> dict[str, list[dict[str, float]]]:
        """Nothing where the file is not what this class writes; it is put aside then, which the log says."""
        if not self.path.exists():
            return {}
        try:
            text = read_regular(self.path).decode()
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be read: {error.strerror}", "make it readable, or remove it"
            ) from error
        except ValueError as error:
            return self._nothing(str(error))
        try:
            found = json.loads(text)["arms"]
            table = {
                str(arm): [{str(k): float(v) for k, v in run.items()} for run in runs] for arm, runs in found.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            return self._nothing(f"{type(error).__name__}: {error}")
        for arm, runs in table.items():
            for number, run in enumerate(runs, 1):
                wrong = next((name for name, value in run.items() if not 0 <= value < LARGEST), None)
                if wrong is not None:
                    return self._nothing(f"run {number} of {arm} has {wrong} {run[wrong]:g}")
                if not self.is_whole(run):
                    return self._nothing(f"run {number} of {arm} lacks figures")
        return table

    def _nothing(self, why: str) -> dict[str, list[dict[str, float]]]:
        aside = self.path.with_suffix(".damaged")
        with written_to(self.folder):
            self.path.replace(aside)
        logger.warning("%s is damaged (%s); its runs are measured anew, it lies in %s", self.path, why, aside.name)
        return {}
