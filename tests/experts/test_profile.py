"""A pack's expert profile: what is written is read, what does not fit is refused, and its scale is the policy's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from strata.errors import CheckpointError
from strata.experts.policy import decay_counts
from strata.experts.profile import PROFILE_FILE, ExpertProfile, find_profile, read_profile

PACK, OTHER = "a1" * 32, "b2" * 32
PICKS = np.array([[40, 0, 10, 50], [25, 25, 25, 25], [0, 0, 0, 0]])


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    ExpertProfile(50, PICKS).write(tmp_path, PACK)
    found = read_profile(tmp_path, PACK, 3, 4)
    assert found is not None
    assert found.rows == 50
    assert found.picks.tolist() == PICKS.tolist()


def test_a_pack_without_one_has_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path, PACK, 3, 4) is None


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
        {"picks": [[1.5] * 4] * 3},
        {"picks": [["1"] * 4] * 3},
        {"picks": [[2**63] * 4] * 3},
        {"rows": True},
        {"rows": 2**63},
        {"rows": None},
        {"pack": None},
        {"pack": OTHER},
        {"format": "strata-expert-profile-1"},
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    ExpertProfile(50, PICKS).write(tmp_path, PACK)
    path = tmp_path / PROFILE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=PROFILE_FILE):
        read_profile(tmp_path, PACK, 3, 4)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).write_bytes(b"\xff\x00")
    with pytest.raises(CheckpointError, match="no expert profile"):
        read_profile(tmp_path, PACK, 3, 4)


def test_a_profile_of_another_pack_of_the_same_shape_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    ExpertProfile(50, PICKS).write(tmp_path, OTHER)
    with pytest.raises(CheckpointError, match=f"{PROFILE_FILE} was learned on another pack"):
        read_profile(tmp_path, PACK, 3, 4)


@pytest.mark.parametrize("kind", ["another pack", "older Strata", "no expert profile", "pipe", "folder", "endless"])
def test_a_profile_that_was_only_found_is_named_in_one_line_and_not_used(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / PROFILE_FILE
    ExpertProfile(50, PICKS).write(tmp_path, OTHER if kind == "another pack" else PACK)
    if kind == "older Strata":  # as it was written before profiles said of which pack they are
        path.write_text(json.dumps({"format": "strata-expert-profile-1", "rows": 50, "picks": PICKS.tolist()}))
    elif kind == "no expert profile":
        path.write_bytes(b"\xff\x00")
    elif kind != "another pack":
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    assert find_profile(tmp_path, PACK, 3, 4) is None
    (record,) = caplog.records
    line = record.getMessage()
    assert PROFILE_FILE in line
    assert "not used" in line
    assert "\n" not in line
    assert {"pipe": "a named pipe", "endless": "a device"}.get(kind, kind) in line


def test_a_profile_of_this_pack_is_found_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ExpertProfile(50, PICKS).write(tmp_path, PACK)
    found = find_profile(tmp_path, PACK, 3, 4)
    assert found is not None
    assert found.picks.tolist() == PICKS.tolist()
    assert find_profile(tmp_path / "nowhere", PACK, 3, 4) is None
    assert not caplog.records
