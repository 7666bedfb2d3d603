"""One answer from ids to events: ends, stops and formats together, and the same for every tokenisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.events import AnswerEvent, Finish, ReasoningPiece, TextPiece, ToolCall, merged
from strata.text.finish_names import chat_reason, completion_reason, messages_reason, response_status
from strata.text.pipeline import ChatPrompt, TextPipeline
from strata.text.stream import TextStream
from strata.text.tokenizer import Tokenizer

EOS, END = 256, 258
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"


def run(stream: TextStream, ids: list[int]) -> list[AnswerEvent]:
    events: list[AnswerEvent] = []
    for id_ in ids:
        events += stream.push(id_)
        if stream.finish is not None:
            break
    return merged(events + stream.close())


@pytest.fixture(scope="module")
def pipeline(bytes_dir: Path) -> TextPipeline:
    return TextPipeline.from_directory(bytes_dir)


def chat_prompt(*, opens: bool = False, tools: tuple[dict[str, Any], ...] = ()) -> ChatPrompt:
    return ChatPrompt((1,), "", opens, tools)


@pytest.mark.parametrize("end", [EOS, END])
def test_each_end_id_ends_the_answer_and_is_not_shown(pipeline: TextPipeline, end: int) -> None:
    stream = pipeline.plain_stream()
    assert run(stream, [*b"Hello", end, *b"more"]) == [TextPiece("Hello")]
    assert stream.finish == Finish("stop", stop_id=end)
    assert stream.num_tokens == 6


def test_an_end_id_at_once_gives_an_empty_answer(pipeline: TextPipeline) -> None:
    stream = pipeline.plain_stream()
    assert run(stream, [END]) == []
    assert stream.finish == Finish("stop", stop_id=END)


def test_ends_of_the_request_and_ignored_eos(pipeline: TextPipeline) -> None:
    stream = pipeline.plain_stream(stop_token_ids=[ord("c")], ignore_eos=True)
    assert run(stream, [*b"a", END, *b"bcd"]) == [TextPiece("ab")]
    assert stream.finish == Finish("stop", stop_id=ord("c"))


def test_length_shows_what_was_held_back(pipeline: TextPipeline) -> None:
    stream = pipeline.plain_stream(stop=["###"])
    assert run(stream, list(b"ab##")) == [TextPiece("ab##")]
    assert stream.finish == Finish("length")
    assert stream.close() == []
    assert stream.finish == Finish("length")


def test_an_end_inside_a_character_shows_one_replacement(pipeline: TextPipeline) -> None:
    stream = pipeline.plain_stream()
    assert run(stream, [*"a😀".encode()[:-1], END]) == [TextPiece("a\ufffd")]


@pytest.mark.parametrize("stop", [["END"], ["ND", "END"], ["x", "one EN"]])
def test_a_stop_string_over_token_borders(stop: list[str], tmp_path: Path) -> None:
    """The same text made of tokens cut at every position: the answer and its end are the same."""
    text = "one END two"
    merges = [text[a:b] for a in range(len(text)) for b in range(a + 2, len(text) + 1)]
    tokenizer = byte_tokenizer(tmp_path, more_tokens=list(dict.fromkeys(merges)))
    answers = set()
    for first in range(len(text)):
        for second in range(first, len(text) + 1):
            parts = [part for part in (text[:first], text[first:second], text[second:]) if part]
            ids = [tokenizer.token_id(part) if len(part) > 1 else ord(part) for part in parts]
            stream = TextStream(tokenizer, stop=stop)
            events = run(stream, [id_ for id_ in ids if id_ is not None])
            answers.add((tuple(events), stream.finish))
    assert len(answers) == 1
    (events_, finish) = answers.pop()
    assert finish is not None
    assert finish.reason == "stop"
    assert finish.stop_string in stop
    assert "".join(event.text for event in events_ if isinstance(event, TextPiece)) in text


def test_a_stop_string_inside_a_character_sequence(pipeline: TextPipeline) -> None:
    stream = pipeline.plain_stream(stop=["。"])
    assert run(stream, list("日本。終".encode())) == [TextPiece("日本")]
    assert stream.finish == Finish("stop", stop_string="。")


def test_a_stop_string_that_names_a_hidden_token(pipeline: TextPipeline) -> None:
    for ids in ([257], list(b"<|im_start|>")):
        stream = pipeline.plain_stream(stop=["<|im_start|>"], ignore_eos=True)
        assert run(stream, [*b"ab", END, *ids, *b"c"]) == [TextPiece("ab")]
        assert stream.finish is not None
        assert (stream.finish.reason, stream.finish.stop_string) == ("stop", "<|im_start|>")


def test_ends_have_a_name_in_each_interface() -> None:
    names = {
        finish: (chat_reason(finish), completion_reason(finish), messages_reason(finish), *response_status(finish))
        for finish in (Finish("stop", stop_id=END), Finish("stop", "x"), Finish("length"), Finish("tool_calls"))
    }
    assert list(names.values()) == [
        ("stop", "stop", "end_turn", "completed", None),
        ("stop", "stop", "stop_sequence", "completed", None),
        ("length", "length", "max_tokens", "incomplete", "max_output_tokens"),
        ("tool_calls", "stop", "tool_use", "completed", None),
    ]


def test_reasoning_then_a_call(pipeline: TextPipeline) -> None:
    stream = pipeline.chat_stream(chat_prompt(tools=(TOOL,)))
    ids = pipeline.tokenizer.encode("<think>\nHm\n</think>\n\nWell.\n" + CALL, markers=True)
    assert run(stream, [*ids, END]) == [
        ReasoningPiece("Hm"),
        TextPiece("Well."),
        ToolCall(0, "f", '{"n": 5}'),
    ]
    assert stream.finish == Finish("tool_calls", stop_id=END)


def test_markup_in_plain_bytes_is_read_like_markup_in_tokens(pipeline: TextPipeline) -> None:
    text = "<think>\nHm\n</think>\n\nWell.\n" + CALL
    answers = []
    for markers in (True, False):
        stream = pipeline.chat_stream(chat_prompt(tools=(TOOL,)))
        answers.append(run(stream, [*pipeline.tokenizer.encode(text, markers=markers), END]))
    assert answers[0] == answers[1]


def test_a_call_cut_off_by_length_is_not_a_call(pipeline: TextPipeline) -> None:
    stream = pipeline.chat_stream(chat_prompt(tools=(TOOL,)))
    assert run(stream, pipeline.tokenizer.encode("A " + CALL[:-3])) == [TextPiece("A " + CALL[:-3])]
    assert stream.finish == Finish("length")
    stream = pipeline.chat_stream(chat_prompt(tools=(TOOL,)))
    run(stream, pipeline.tokenizer.encode(CALL))
    assert stream.finish == Finish("length"), "a call that came whole before the limit was met"


def test_tokens_of_reasoning_are_counted(pipeline: TextPipeline) -> None:
    stream = pipeline.chat_stream(chat_prompt(opens=True))
    assert run(stream, [*b"ab", 260, *b"cd", END]) == [ReasoningPiece("ab"), TextPiece("cd")]
    assert (stream.num_reasoning_tokens, stream.num_tokens) == (3, 6)


def test_markers_that_a_tokenizer_hides_still_reach_the_parser(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"special": false', '"special": true'))
    pipeline = TextPipeline.from_directory(tmp_path)
    assert 259 in pipeline.tokenizer.hidden_ids
    assert run(pipeline.chat_stream(chat_prompt()), [259, 65, 260, 66]) == [ReasoningPiece("A"), TextPiece("B")]
    assert run(pipeline.plain_stream(), [259, 65, 260, 66]) == [TextPiece("AB")]


@settings(max_examples=200)
@given(st.data())
def test_any_ids_any_split_of_the_markup(pipeline: TextPipeline, data: st.DataObject) -> None:
    """Markup as tokens or spelled out, any stop string: the events depend on the text alone."""
    words = ["<think>", "</think>", "\n", "a", "é", "😀", "<tool_call>", CALL, "</tool_call>", "STOP", "ST"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    tokenizer = pipeline.tokenizer
    streams = [pipeline.chat_stream(chat_prompt(tools=(TOOL,)), stop=["STOP", "a\n"]) for _ in range(2)]
    answers = [
        run(streams[0], tokenizer.encode(text, markers=True)),
        run(streams[1], list(text.encode())),
    ]
    assert answers[0] == answers[1]
    assert streams[0].finish == streams[1].finish


def test_nothing_can_be_pushed_after_the_end(byte_tok: Tokenizer) -> None:
    stream = TextStream(byte_tok, end_ids=[END])
    stream.push(END)
    with pytest.raises(AssertionError, match="ended"):
        stream.push(65)
