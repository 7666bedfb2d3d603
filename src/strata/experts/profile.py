"""An expert profile: how often text picked each expert, learned once and kept beside a pack's other files.

Lives in ``experts`` because it ranks them: the hottest start in the fastest tier. It is a hint and nothing else, so a
pack without one works, and it can never change a token. It must not know what the text was, and of its model it knows
the pack's digest alone.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.errors import CheckpointError
from strata.experts.policy import DECAY, Heat
from strata.files import atomic_write, read_regular

__all__ = ["PROFILE_FILE", "ExpertProfile", "find_profile", "read_profile"]

logger = logging.getLogger(__name__)

PROFILE_FILE = "expert-profile.json"
_FORMAT = "strata-expert-profile-2"
_WITHOUT_PACK = "strata-expert-profile-1"
_LARGEST = 64 << 20  # bytes: ten million experts


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

    def write(self, folder: Path, pack: str) -> None:
        """Writes the profile into the folder of the pack of digest ``pack``, whole or not at all."""
        table = {"format": _FORMAT, "pack": pack, "rows": self.rows, "picks": self.picks.tolist()}
        with atomic_write(folder / PROFILE_FILE, "w") as file:
            file.write(json.dumps(table) + "\n")


def find_profile(folder: Path, pack: str, num_layers: int, num_experts: int) -> ExpertProfile | None:
    """The profile that lies beside a pack, as the hint that it is: one that ``read_profile`` refuses is named in one
    line of the log and not used."""
    try:
        return read_profile(folder, pack, num_layers, num_experts)
    except CheckpointError as error:
        logger.warning("%s; it is not used, the start is as without a profile", error)
        return None


def read_profile(folder: Path, pack: str, num_layers: int, num_experts: int) -> ExpertProfile | None:
    """The profile of the pack of digest ``pack`` out of its folder, None where there is none.

    Raises ``CheckpointError`` for one that cannot be read, is of another pack, or does not fit."""
    path = folder / PROFILE_FILE
    remedy = f"remove {PROFILE_FILE}: it only speeds up the start"
    try:
        table = json.loads(read_regular(path, _LARGEST))
        if table["format"] == _WITHOUT_PACK:
            raise CheckpointError(f"{path} is of an older Strata and does not say of which pack it is", remedy)
        known, of_pack, rows = table["format"] == _FORMAT, table["pack"], table["rows"]
        picks = np.array(table["picks"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as an expert profile: {error.strerror}", remedy) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is no expert profile: {error}", remedy) from error
    if not known or type(rows) is not int or not 1 <= rows < 1 << 62 or picks.dtype != np.int64:
        raise CheckpointError(f"{path} is no expert profile: format, rows or picks are not as they are written", remedy)
    if of_pack != pack:
        raise CheckpointError(f"{path} was learned on another pack", remedy)
    if picks.shape != (num_layers, num_experts):
        raise CheckpointError(
            f"{path} is for {' x '.join(map(str, picks.shape))} experts, the pack has {num_layers} x {num_experts}",
            remedy,
        )
    if picks.min() < 0 or picks.max() > rows:
        raise CheckpointError(f"{path}: {picks.min()} to {picks.max()} of {rows} rows picked an expert", remedy)
    return ExpertProfile(rows, picks)
