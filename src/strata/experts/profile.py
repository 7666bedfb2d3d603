"""An expert profile: how often text picked each expert, learned once and kept beside a pack's other files.

Lives in ``experts`` because it ranks them: the hottest start in the fastest tier. It is a hint and nothing else, so a
pack without one works, and it can never change a token. It must not know what the text was or which model it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.errors import CheckpointError
from strata.experts.policy import DECAY, Heat
from strata.files import atomic_write

__all__ = ["PROFILE_FILE", "ExpertProfile", "read_profile"]

PROFILE_FILE = "expert-profile.json"
_FORMAT = "strata-expert-profile-1"


@dataclass(frozen=True, eq=False)
class ExpertProfile:
    """``picks`` [layers, experts]: how many of ``rows`` rows of text picked each expert. A layer that the text never
    reached (a draft block's) has zeros."""

    rows: int
    picks: NDArray[np.int64]

    def heat(self, adapt_every: int) -> Heat:
        """The table for ``ExpertSystem.open``: what decayed counts settle at where text like the profile's goes on.

        ``adapt_every`` rounds lie between two adaptations, so the running conversation outweighs the profile after as
        many adaptations as it would outweigh an older conversation; 0 (never adapted) counts as one.
        """
        return self.picks / self.rows * (max(1, adapt_every) / (1.0 - DECAY))

    def write(self, folder: Path) -> None:
        """Writes the profile into a pack's folder, whole or not at all."""
        table = {"format": _FORMAT, "rows": self.rows, "picks": self.picks.tolist()}
        with atomic_write(folder / PROFILE_FILE, "w") as file:
            file.write(json.dumps(table) + "\n")


def read_profile(folder: Path, num_layers: int, num_experts: int) -> ExpertProfile | None:
    """The profile of a pack's folder, None where it has none. Raises ``CheckpointError`` for one that does not fit."""
    path = folder / PROFILE_FILE
    if not path.exists():
        return None
    remedy = f"remove {PROFILE_FILE}: it only speeds up the start"
    try:
        table = json.loads(path.read_bytes())
        known, rows = table["format"] == _FORMAT, int(table["rows"])
        picks = np.array(table["picks"], np.int64)
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} is no expert profile: {error}", remedy) from error
    if not known or rows < 1 or picks.shape != (num_layers, num_experts):
        raise CheckpointError(
            f"{path} is for {' x '.join(map(str, picks.shape))} experts, the pack has {num_layers} x {num_experts}",
            remedy,
        )
    if picks.min() < 0 or picks.max() > rows:
        raise CheckpointError(f"{path}: {picks.min()} to {picks.max()} of {rows} rows picked an expert", remedy)
    return ExpertProfile(rows, picks)
