"""No copyleft and no unknown licence in what everybody installs, and pages that say what is really locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load_tool import load_tool

licences = load_tool("licences")


def test_the_base_install_is_permissive_or_allowed_by_name() -> None:
    refused = [f"{one.name}: {one.expression}" for one in licences.locked_licences() if one.install == "base"
               and not one.is_allowed]  # fmt: skip
    assert not refused


def test_every_exception_is_needed_and_has_its_reason(root: Path) -> None:
    found = {one.name: one for one in licences.locked_licences() if one.install == "base"}
    record = next((root / "docs" / "decisions").glob("0009-*.md")).read_text()
    for name in licences.EXCEPTIONS:
        assert not found[name].is_permissive
        assert name in record


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND LGPL-2.1-or-later", False),
        ("(MIT OR Apache-2.0) AND BSD-3-Clause", True),
        ("unknown", False),
        ("MPL-2.0 AND MIT", False),
        ("LicenseRef-NVIDIA-SOFTWARE-LICENSE", False),
    ],
)
def test_what_counts_as_allowed(expression: str, allowed: bool) -> None:
    assert licences.Licence("some-package", "1", expression, "base").is_allowed is allowed


def test_an_exception_holds_for_its_exact_licence_alone() -> None:
    assert licences.Licence("tqdm", "1", "MPL-2.0 AND MIT", "base").is_allowed
    assert not licences.Licence("tqdm", "1", "GPL-3.0-only", "base").is_allowed


def test_pages_are_up_to_date(root: Path) -> None:
    """By row, since another Python version may need a few packages fewer."""
    page = licences.PAGE.read_text()
    notice = licences.NOTICE.read_text()
    for one in licences.locked_licences("cuda", "dev"):
        assert licences.row(one) in page, "run `make generate`"
        if one.install == "base":
            assert f"{one.name} {one.version}: {one.expression}\n" in notice, "run `make generate`"


def test_the_generated_part_of_notice_is_replaced_and_the_rest_kept() -> None:
    some = [licences.Licence("a", "1", "MIT", "base")]
    once = licences.render_notice("Strata\n", some)
    own_words = once + "more words\n"
    again = licences.render_notice(own_words, [licences.Licence("b", "2", "ISC", "base")])
    assert again.startswith("Strata\n")
    assert again.endswith("more words\n")
    assert "b 2: ISC" in again
    assert "a 1: MIT" not in again
