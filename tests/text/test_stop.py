"""Stop strings, cut everywhere (fault 30), against a reading of the whole text character by character."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.errors import RequestError
from strata.text.stop import StopStrings


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    watch = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(watch.push(piece))
        if watch.matched is not None:
            return "".join(shown), watch.matched, shown
    return "".join(shown) + watch.finish(), None, shown


def every_cut(text: str) -> list[list[str]]:
    """Every way to cut a short text into pieces."""
    ways = []
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), len(text)]
        ways.append([text[a:b] for a, b in itertools.pairwise(bounds)])
    return ways


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one END two", ["END"]),
        ("aEENDb", ["END"]),
        ("xabcabdy", ["abd"]),
        ("abababac", ["ababac"]),
        ("abcde", ["abcdx", "bcd"]),
        ("abcd", ["abcd", "bcd", "d"]),
        ("EN EN EN", ["END"]),
        ("日本。終", ["。"]),
        ("stop", ["st", "stop"]),
        ("a\n\nb", ["\n\n"]),
    ],
)
def test_every_cut_gives_the_same_answer(text: str, stops: list[str]) -> None:
    wanted = expected(text, stops)
    for pieces in every_cut(text):
        assert run(pieces, stops)[:2] == wanted, pieces


@settings(max_examples=400)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
@example(["a", "a", "b"], ["aab", "ab"])
def test_any_text_any_stops_any_cut(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops)[:2] == expected("".join(pieces), stops)


@settings(max_examples=200)
@given(st.text(alphabet="abc", max_size=12), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = ""
    for index, char in enumerate(text, 1):
        shown += watch.push(char)
        if watch.matched is not None:
            return
        held = text[len(shown) : index]
        assert shown + held == text[:index]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_ordinary_text_that_begins_like_a_stop_is_shown() -> None:
    watch = StopStrings(["###"])
    assert [watch.push(piece) for piece in ("a#", "#", " b", "##")] == ["a", "", "## b", ""]
    assert watch.finish() == "##"
    assert watch.matched is None


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="stop"):
        StopStrings(["a", ""])
