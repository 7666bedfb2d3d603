"""Marks inside control tokens: nothing that was marked reads as one, and unmarking loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.errors import RequestError
from strata.text.control_text import ControlText, ControlToken, Segment
from strata.text.tokenizer import Tokenizer

MARK = "\ufdd0"
# Tokens that overlap, nest and repeat are what a search that looks once gets wrong.
NAMES = ["<s>", "<<s>>", "s><", "ab", "bc", "aa"]
CONTROL = ControlText(ControlToken(name, special=name != "bc") for name in NAMES)
words = st.text(alphabet="<s>abc", max_size=12)


@settings(max_examples=400)
@given(words, words, words)
@example("ab", "c", "")
@example("", "abc", "")
@example("aaa", "a", "a")
def test_marked_text_never_reads_as_a_token_beside_any_other_marked_text(left: str, text: str, right: str) -> None:
    marked = [CONTROL.mark(part, MARK) for part in (left, text, right)]
    joined = "".join(marked)
    assert not any(name in joined for name in NAMES)
    assert joined.replace(MARK, "") == left + text + right


@settings(max_examples=400)
@given(words, words.filter(bool), words)
@example("<", "s> b", "")
@example("", "a <", "s>")
@example("<", "s", ">")
def test_text_completes_no_token_of_a_template(before: str, text: str, after: str) -> None:
    """What the template writes beside it reads as a token only where it is one by itself."""
    joined = before + CONTROL.mark(text, MARK) + after
    for name in NAMES:
        assert joined.count(name) <= before.count(name) + after.count(name)


@given(words)
def test_pieces_hold_no_token(text: str) -> None:
    pieces = CONTROL.pieces(text)
    assert "".join(pieces) == text
    assert not any(name in piece for name in NAMES for piece in pieces)


@given(words)
def test_marking_special_tokens_leaves_the_others(text: str) -> None:
    marked = CONTROL.mark(text, MARK, special_only=True)
    assert not any(name in marked for name in NAMES if name != "bc")
    assert marked.replace(MARK, "") == text
    assert "bc" in CONTROL.mark("bc", MARK, special_only=True)


def test_segments_take_white_space_as_their_tokens_say() -> None:
    control = ControlText(
        [ControlToken("[L]", strips_left=True), ControlToken("[R]", strips_right=True), ControlToken("[N]")]
    )
    rendered = f"a [L] b [R] c [N] d {control.mark('[N]', MARK)} "
    assert control.segments(rendered, MARK) == [
        Segment("a", False),
        Segment("[L]", True),
        Segment(" b ", False),
        Segment("[R]", True),
        Segment("c ", False),
        Segment("[N]", True),
        Segment(" d [N] ", False),
    ]
    assert control.segments("a [L] b", MARK) == [Segment("a [L] b", True)]


def test_the_mark_is_a_character_that_does_not_occur() -> None:
    assert CONTROL.mark_for(["plain"]) == "\ufdd0"
    assert CONTROL.mark_for(["\ufdd0", "x\ufdd1"]) == "\ufdd2"
    with pytest.raises(RequestError, match="noncharacters"):
        CONTROL.mark_for(map(chr, range(0xFDD0, 0xFDF0)))


def test_no_control_tokens_at_all() -> None:
    control = ControlText([])
    assert not control.found_in("<s>")
    assert control.mark("<s>", MARK) == "<s>"
    assert control.segments("<s>", MARK) == [Segment("<s>", True)]


def test_very_many_control_tokens_in_a_text(byte_tok: Tokenizer, spm_tok: Tokenizer) -> None:
    assert byte_tok.encode("<|im_end|>" * 5000) == list(b"<|im_end|>" * 5000)
    ids = spm_tok.encode("a" + "</s>" * 5000, bos=False)
    assert spm_tok.decode(ids) == "a" + "</s>" * 5000
