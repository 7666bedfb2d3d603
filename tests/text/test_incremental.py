"""Streams of tokens to text: no half character is ever shown (fault 31)."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.text.incremental import IncrementalDecoder
from strata.text.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, from_start=True)
    return [decoder.push(id_) for id_ in ids] + [decoder.finish()]


@pytest.mark.parametrize("text", ["😀", "東京", "👩‍👩‍👧 é e\u0301", "a😀b京c", "\U0010ffff\u0800\u07ff"])
def test_characters_made_of_byte_tokens_come_whole(byte_tok: Tokenizer, text: str) -> None:
    shown = pieces(byte_tok, list(text.encode()))
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text
    assert all(len(piece) <= 1 for piece in shown)


@settings(max_examples=300)
@given(st.binary(max_size=24))
@example(b"\xf0\x9f\x98")
@example(b"\xf0\x9f\x98a\xff\xe6\x9d")
@example(b"\xed\xa0\x80\xc0\x80")
def test_joined_pieces_equal_the_whole_for_any_bytes(byte_tok: Tokenizer, data: bytes) -> None:
    assert "".join(pieces(byte_tok, list(data))) == data.decode("utf-8", "replace") == byte_tok.decode(data)


@settings(max_examples=150)
@given(st.text(max_size=20))
def test_valid_text_never_shows_a_replacement(bpe_tok: Tokenizer, spm_tok: Tokenizer, text: str) -> None:
    text = "a" + text.replace("\ufffd", "?").replace("▁", "_")
    for tokenizer in (bpe_tok, spm_tok):
        ids = tokenizer.encode(text, bos=False)
        shown = pieces(tokenizer, ids)
        assert "".join(shown) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(shown)
        if tokenizer is spm_tok:
            assert "".join(shown) == text


def test_hidden_tokens_are_not_shown_unless_asked_for(byte_tok: Tokenizer) -> None:
    ids = [65, 257, 66, 259, 256]
    assert "".join(pieces(byte_tok, ids)) == "AB<think>"
    decoder = IncrementalDecoder(byte_tok, shown=frozenset({257}))
    assert "".join(decoder.push(id_) for id_ in ids) == "A<|im_start|>B<think>"


def test_a_hidden_token_inside_a_character_changes_nothing(byte_tok: Tokenizer) -> None:
    first, *rest = "京".encode()
    assert pieces(byte_tok, [first, 257, *rest])[-2:] == ["京", ""]


def test_ids_beyond_the_vocabulary_say_nothing(byte_tok: Tokenizer) -> None:
    assert "".join(pieces(byte_tok, [65, 9999, 66])) == "AB" == byte_tok.decode([65, 9999, 66])


def test_only_the_start_of_a_text_loses_its_space(spm_tok: Tokenizer) -> None:
    ids = spm_tok.encode("the dog", bos=False)
    assert "".join(pieces(spm_tok, ids)) == "the dog"
    continued = IncrementalDecoder(spm_tok)
    assert "".join(continued.push(id_) for id_ in ids) == " the dog"
