"""A pack's expert profile: what is written is read, what does not fit is refused, and its scale is the policy's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata.errors import CheckpointError
from strata.experts.policy import decay_counts
from strata.experts.profile import PROFILE_FILE, ExpertProfile, read_profile

PICKS = np.array([[40, 0, 10, 50], [25, 25, 25, 25], [0, 0, 0, 0]])


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    ExpertProfile(50, PICKS).write(tmp_path)
    found = read_profile(tmp_path, 3, 4)
    assert found is not None
    assert found.rows == 50
    assert found.picks.tolist() == PICKS.tolist()


def test_a_pack_without_one_has_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path, 3, 4) is None


def test_heat_is_where_decayed_counts_settle() -> None:
    """Sixteen rounds like the profile's text between adaptations, over and over."""
    per_round = PICKS / 50
    counts = np.zeros(PICKS.shape)
    for _ in range(300):
        counts = decay_counts(counts, (16 * per_round).astype(np.float64))  # type: ignore[arg-type]
    assert np.allclose(ExpertProfile(50, PICKS).heat(16), counts)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"rows": 0},
        {"rows": 49},
        {"picks": PICKS[:2].tolist()},
        {"picks": (-PICKS).tolist()},
        {"picks": [[1, 2], [3]]},
        {"picks": "none"},
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    ExpertProfile(50, PICKS).write(tmp_path)
    path = tmp_path / PROFILE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=PROFILE_FILE):
        read_profile(tmp_path, 3, 4)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).write_bytes(b"\xff\x00")
    with pytest.raises(CheckpointError, match="no expert profile"):
        read_profile(tmp_path, 3, 4)
