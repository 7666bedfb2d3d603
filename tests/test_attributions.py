"""NOTICE names every package whose text the small model saw, with the licence that the corpus' builder read."""

from __future__ import annotations

from pathlib import Path

from tests.load_tool import load_tool

attributions = load_tool("attributions")
licences = load_tool("licences")


def test_notice_is_up_to_date(root: Path) -> None:
    corpus = attributions.read_corpus()
    assert len(corpus["sources"]) > 50
    assert attributions.render_section(corpus) in (root / "NOTICE").read_text(), "run `make generate`"


def test_every_source_is_permissive() -> None:
    for one in attributions.read_corpus()["sources"]:
        assert licences.Licence(one["name"], one["version"], one["licence"], "text").is_permissive, one


def test_the_other_parts_of_notice_are_kept() -> None:
    corpus = {"sources": [{"name": "a", "version": "1", "licence": "MIT", "bytes": 5}]}
    once = attributions.render_notice("Strata\n", corpus) + "own words\n"
    held = {"sources": [{"name": "b", "version": "2", "licence": "ISC", "bytes": 5, "held_out": True}]}
    again = attributions.render_notice(once, held)
    assert again.startswith("Strata\n")
    assert again.endswith("own words\n")
    assert "b 2: ISC (measured only)" in again
    assert "a 1" not in again
