"""Reasoning and tool calls: every cut and one character at a time give what the whole text gives (fault 36)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ConfigError
from strata.text.answer_parser import AnswerParser, tool_format_of
from strata.text.events import AnswerEvent, ReasoningPiece, TextPiece, ToolCall, merged
from strata.text.family_template import FAMILY_TEMPLATE

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "scale": {"type": "number"},
                    "metric": {"type": "boolean"},
                    "where": {"type": "object"},
                    "tags": {"type": "array"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "limit": {"type": ["integer", "null"]},
                },
            },
        },
    },
    {"name": "now"},
]


def run(pieces: list[str], **options: Any) -> list[AnswerEvent]:
    parser = AnswerParser(**options)
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return merged(events + parser.finish())


def tagged(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def call(index: int, name: str, **arguments: Any) -> ToolCall:
    return ToolCall(index, name, json.dumps(arguments, ensure_ascii=False))


R, T = ReasoningPiece, TextPiece
REASONING = {"reasoning": True}
TAGGED = {"reasoning": True, "tool_format": "tagged", "tools": TOOLS}
JSON = {"reasoning": True, "tool_format": "json", "tools": TOOLS}

CASES: dict[str, tuple[str, dict[str, Any], list[AnswerEvent]]] = {
    "plain": ("Hello <b>you</b>", REASONING, [T("Hello <b>you</b>")]),
    "empty": ("", TAGGED, []),
    "thought": ("<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", REASONING, [R("Hm.\n\nSo."), T("Yes.\n")]),
    "thought opened by the prompt": ("\nHm.\n</think>\n\nYes.", {"opened": True}, [R("Hm."), T("Yes.")]),
    "empty thought": ("<think>\n\n</think>\n\nYes.", REASONING, [T("Yes.")]),
    "only a thought": ("<think>\nHm.\n", REASONING, [R("Hm.")]),
    "only an opening": ("<think>", REASONING, []),
    "never closed": ("Hm </thin", {"opened": True}, [R("Hm </thin")]),
    "closing prefixes in a thought": ("<think>a</b></thin\n</think>b", REASONING, [R("a</b></thin"), T("b")]),
    "white space first": (" \n<think>a</think>b", REASONING, [R("a"), T("b")]),
    "a later tag is text": ("See <think>a</think>", REASONING, [T("See <think>a</think>")]),
    "a second thought is text": ("<think>a</think>b<think>c", REASONING, [R("a"), T("b<think>c")]),
    "almost a tag": ("<thing>", REASONING, [T("<thing>")]),
    "reasoning off": ("<think>a</think>b", {}, [T("<think>a</think>b")]),
    "tagged call": (tagged("weather", city="Bern"), TAGGED, [call(0, "weather", city="Bern")]),
    "text before a call": ("Let me see.\n\n" + tagged("now"), TAGGED, [T("Let me see."), call(0, "now")]),
    "two calls": (
        "<think>\nx\n</think>\n\n" + tagged("now") + "\n" + tagged("weather", days="3") + "\n",
        TAGGED,
        [R("x"), call(0, "now"), call(1, "weather", days=3)],
    ),
    "text after a call": (tagged("now") + "\nDone.", TAGGED, [call(0, "now"), T("\nDone.")]),
    "typed values": (
        tagged("weather", city="7", days="7", scale="1.5", metric="True", where='{"a": [1]}', tags="[1, 2]"),
        TAGGED,
        [call(0, "weather", city="7", days=7, scale=1.5, metric=True, where={"a": [1]}, tags=[1, 2])],
    ),
    "null where it is allowed": (
        tagged("weather", note="null", limit="null", city="null"),
        TAGGED,
        [call(0, "weather", note=None, limit=None, city="null")],
    ),
    "values that do not fit stay text": (
        tagged("weather", days="many", metric="2", tags='{"a": 1}', scale="NaN", unknown="5"),
        TAGGED,
        [call(0, "weather", days="many", metric="2", tags='{"a": 1}', scale="NaN", unknown="5")],
    ),
    "several lines and the format's own tags in a value": (
        tagged("weather", city="a\n</parameter>\n</tool_call>\n<b>\n\n", note="<tool_call>x</tool_call>"),
        TAGGED,
        [call(0, "weather", city="a\n</parameter>\n</tool_call>\n<b>\n\n", note="<tool_call>x</tool_call>")],
    ),
    "a tag that is spoken of": ("Use <tool_call> to call.", TAGGED, [T("Use <tool_call> to call.")]),
    "an empty block": ("<tool_call></tool_call>", TAGGED, [T("<tool_call></tool_call>")]),
    "a block that breaks off": (
        "A.\n<tool_call>\n<function=now>\n<par",
        TAGGED,
        [T("A.\n<tool_call>\n<function=now>\n<par")],
    ),
    "a malformed block before a good one": (
        "<tool_call>\n<function=now>\noops</tool_call>\n" + tagged("now"),
        TAGGED,
        [T("<tool_call>\n<function=now>\noops</tool_call>"), call(0, "now")],
    ),
    "opening tags in a row": (
        "<tool_call><tool_call>" + tagged("now"),
        TAGGED,
        [T("<tool_call><tool_call>"), call(0, "now")],
    ),
    "a call inside a thought is thought": ("<think>" + tagged("now"), TAGGED, [R(tagged("now"))]),
    "no tools, no calls": (tagged("now"), REASONING, [T(tagged("now"))]),
    "json call": (
        'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
        JSON,
        [T("Sure."), call(0, "weather", city="Zürich", days=2)],
    ),
    "json with the closing tag in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x </tool_call> y"}}</tool_call>',
        JSON,
        [call(0, "f", a="x </tool_call> y")],
    ),
    "json with line breaks in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        JSON,
        [call(0, "f", a="x\ny")],
    ),
    "json arguments as a string, and none": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "g"}</tool_call>',
        JSON,
        [call(0, "f", a=1), call(1, "g")],
    ),
    "json that is not a call": (
        '<tool_call>{"nome": "f"}</tool_call>',
        JSON,
        [T('<tool_call>{"nome": "f"}</tool_call>')],
    ),
    "json without its last brace": (
        '<tool_call>{"name": "f"</tool_call> then <tool_call>{"name": "g"}</tool_call>',
        JSON,
        [T('<tool_call>{"name": "f"</tool_call> then'), call(0, "g")],
    ),
    "json with NaN": (
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        JSON,
        [T('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>')],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_whole_text(name: str) -> None:
    text, options, expected = CASES[name]
    assert run([text], **options) == expected


@pytest.mark.parametrize("name", CASES)
def test_one_character_at_a_time(name: str) -> None:
    text, options, expected = CASES[name]
    assert run(list(text), **options) == expected


@pytest.mark.parametrize("name", CASES)
def test_cut_at_every_position(name: str) -> None:
    text, options, expected = CASES[name]
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], **options) == expected, cut


TAGS = "<think> </think> <tool_call> </tool_call> <function=f> </function> <parameter=a> </parameter>"
PARTS = [*TAGS.split(), "\n", " ", "x", "<", "</", "{", '{"name": "f"}', '"', "}"]


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(PARTS),
        max_size=14,
    ),
    st.sampled_from(["tagged", "json"]),
    st.booleans(),
)
def test_any_mixture_is_cut_proof_and_loses_nothing(parts: list[str], tool_format: str, opened: bool) -> None:
    options: dict[str, Any] = {"reasoning": True, "opened": opened, "tool_format": tool_format}
    text = "".join(parts)
    whole = run([text], **options)
    assert run(list(text), **options) == whole
    assert run(parts, **options) == whole
    if not any(isinstance(event, ToolCall) for event in whole):
        shown = "".join(event.text for event in whole if not isinstance(event, ToolCall))
        rest = iter(text)
        assert all(char in rest for char in shown), "shown text is a part of the answer, in order"
        assert len(text) - len(shown) <= text.count("\n") + text.count(" ") + len("<think></think>")


def test_ordinary_text_is_shown_at_once() -> None:
    parser = AnswerParser(**TAGGED)
    shown = [merged(parser.push(piece)) for piece in ("He", "llo", " <", "b> ", "you")]
    assert shown == [[T("He")], [T("llo")], [], [T(" <b>")], [T(" you")]]


def test_reasoning_is_shown_as_it_comes() -> None:
    parser = AnswerParser(opened=True)
    assert parser.in_reasoning
    assert [merged(parser.push(piece)) for piece in ("\n", "Hm", " so\n", "on")] == [
        [],
        [R("Hm")],
        [R(" so")],
        [R("\non")],
    ]
    parser.push("</think>")
    assert not parser.in_reasoning


def test_format_is_read_off_the_template() -> None:
    assert tool_format_of(FAMILY_TEMPLATE) == "tagged"
    assert tool_format_of('<tool_call>\n{"name": }') == "json"
    assert tool_format_of("{{ messages }}") is None
    with pytest.raises(ConfigError, match="xml"):
        AnswerParser(tool_format="xml")  # type: ignore[arg-type]
