"""Tool calls quoted in code or in a block quote are text, calls elsewhere are calls (decision 0120), however the answer
is cut; where a place lies is held against a CommonMark parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from strata.text.answer_parser import AnswerParser
from strata.text.events import AnswerEvent, ReasoningPiece, TextPiece, ToolCall, merged
from strata.text.parsers.code_context import CodeContext


def run(pieces: list[str], **options: Any) -> list[AnswerEvent]:
    parser = AnswerParser(reasoning=True, tool_format="json", **options)
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return merged(events + parser.finish())


def block(name: str, argument: str = "") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {json.dumps(argument)}}}}}\n</tool_call>'


def call(index: int, name: str, argument: str = "") -> ToolCall:
    return ToolCall(index, name, json.dumps({"a": argument}))


F, G = block("f"), block("g")
T, R = TextPiece, ReasoningPiece

# Answer -> events. "F" and "G" in an answer stand for blocks.
CASES: dict[str, list[AnswerEvent]] = {
    # Calls
    "F": [call(0, "f")],
    "<think>\n`F`\n</think>\n\nF": [R(f"`{F}`"), call(0, "f")],
    "Well, F": [T("Well,"), call(0, "f")],
    "FG": [call(0, "f"), call(1, "g")],
    "`a` F and `b`": [T("`a`"), call(0, "f"), T(" and `b`")],
    "```\ncode\n```\nF": [T("```\ncode\n```"), call(0, "f")],
    "~~~\n```\n~~~\nF": [T("~~~\n```\n~~~"), call(0, "f")],
    "    ```\n\nF\n\n    ```": [T("    ```"), call(0, "f"), T("\n\n    ```")],
    "\\`F`": [T("\\`"), call(0, "f"), T("`")],
    "> quote\n\nF": [T("> quote"), call(0, "f")],
    "> quote\nF": [T("> quote"), call(0, "f")],
    "1 > 0 F": [T("1 > 0"), call(0, "f")],
    "``` a`b\nF": [T("``` a`b"), call(0, "f")],
    # Closed code and quotes
    "```\nF\n```": [T(f"```\n{F}\n```")],
    "```xml\nF\n```\nSo.": [T(f"```xml\n{F}\n```\nSo.")],
    "```\nF\nG\n```\nG": [T(f"```\n{F}\n{G}\n```"), call(0, "g")],
    "````\n```\nF\n```\n````\nG": [T(f"````\n```\n{F}\n```\n````"), call(0, "g")],
    "  ~~~ a`b\nF\n   ~~~~  \nG": [T(f"  ~~~ a`b\n{F}\n   ~~~~"), call(0, "g")],
    "```json F\n```": [T(f"```json {F}\n```")],
    "```F```": [T(f"```{F}```")],
    "`F`": [T(f"`{F}`")],
    "Say `F` or ``G ` `` now.": [T(f"Say `{F}` or ``{G} ` `` now.")],
    "a `b\nF\nc` d": [T(f"a `b\n{F}\nc` d")],
    "``a `F` b": [T(f"``a `{F}` b")],
    "`` ` F`` G": [T(f"`` ` {F}``"), call(0, "g")],
    "`a \\` F": [T("`a \\`"), call(0, "f")],
    "> F\n\nG": [T(f"> {F}"), call(0, "g")],
    "   > > so: F": [T(f"   > > so: {F}")],
    "- > F": [T(f"- > {F}")],
    "```\n> F\n```": [T(f"```\n> {F}\n```")],
    "- ```\n  F\n  ```": [T(f"- ```\n  {F}\n  ```")],
    "1. x\n\n    ```\n    F\n    ```": [T(f"1. x\n\n    ```\n    {F}\n    ```")],
    # Open to the end
    "```\nF": [T("```"), call(0, "f")],
    "```\nF\n``": [T("```"), call(0, "f"), T("\n``")],
    "````\nF\n```": [T("````"), call(0, "f"), T("\n```")],
    "```\nF\n~~~\n": [T("```"), call(0, "f"), T("\n~~~")],
    "```\nF\n    ```": [T("```"), call(0, "f"), T("\n    ```")],
    "```\nF\n``` no": [T("```"), call(0, "f"), T("\n``` no")],
    "```\n> F": [T("```\n>"), call(0, "f")],
    "`F": [T("`"), call(0, "f")],
    "`F``": [T("`"), call(0, "f"), T("``")],
    "`F\n\n`": [T("`"), call(0, "f"), T("\n\n`")],
    "a `\n\nF`": [T("a `"), call(0, "f"), T("`")],
    "# a ` b\nF `": [T("# a ` b"), call(0, "f"), T(" `")],
    "- a ` b\n- F `": [T("- a ` b\n-"), call(0, "f"), T(" `")],
    "a `\n---\nF `": [T("a `\n---"), call(0, "f"), T(" `")],
    "`F\n```\nG\n```": [T("`"), call(0, "f"), T(f"\n```\n{G}\n```")],
    "`F `` G `` x\n\n": [T("`"), call(0, "f"), T(f" `` {G} `` x")],
    "```\nF\n\nG": [T("```"), call(0, "f"), call(1, "g")],
}


def written(short: str) -> str:
    return short.replace("F", F).replace("G", G)


@pytest.mark.parametrize("short", CASES)
def test_whole_and_cut_at_every_position(short: str) -> None:
    text, expected = written(short), CASES[short]
    assert run([text]) == expected
    assert run(list(text)) == expected
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]]) == expected, cut


def test_backticks_and_fences_of_an_argument_count_for_nothing() -> None:
    loud = block("f", "`x` ``` \n```\ncode")
    assert run([f"Use ` so: {loud}"]) == [T("Use ` so:"), call(0, "f", "`x` ``` \n```\ncode")]
    body = "<function=f>\n<parameter=a>\n```python\nx\n```\n</parameter>\n</function>"
    parser = AnswerParser(tool_format="tagged")
    events = parser.push(f"```\n<tool_call>\n{body}\n</tool_call>")
    assert merged(events + parser.finish()) == [T("```"), call(0, "f", "```python\nx\n```")]


def test_a_quoted_call_is_held_until_it_is_decided_and_no_longer() -> None:
    parser = AnswerParser(tool_format="json")
    assert merged(parser.push(f"```\n{F} a\n")) == [T("```")]
    assert merged(parser.push("b\n")) == []
    assert merged(parser.push("```\nc")) == [T(f"\n{F} a\nb\n```\nc")]
    assert merged(parser.push(f" {G}")) == [call(0, "g")]
    assert merged(parser.push(f"\n> {F}")) == [T(f"\n> {F}")]
    assert merged(parser.push(f"\n`{F}")) == [T("\n`")]
    assert merged(parser.push("\n\n")) == [call(1, "f")]
    assert parser.finish() == []


@pytest.mark.parametrize("short", CASES)
def test_a_forced_call_is_a_call_wherever_it_lies(short: str) -> None:
    text = written(short)
    thought = text.count("<tool_call>", 0, max(0, text.find("</think>")))
    found = [event for event in run(list(text), forced=True) if isinstance(event, ToolCall)]
    assert len(found) == text.count("<tool_call>") - thought


def test_an_answer_goes_on_from_an_open_fence() -> None:
    assert run([f"{F}\n```\n{G}"], before="So:\n```\n") == [T(f"{F}\n```"), call(0, "g")]
    assert run([f"{F}\n```"], before="So:\n```\n```\n") == [call(0, "f"), T("\n```")]
    assert run([f" {F}"], before="> so") == [T(f" {F}")]


PARTS = ["F", "G", "`", "``", "```", "~~~", "\n", "\n\n", " ", "> ", "- ", "# ", "a", "\\", "<", "<tool_call>"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=14), st.booleans())
def test_any_mixture_is_cut_proof_and_loses_nothing(parts: list[str], forced: bool) -> None:
    parts = [written(part) for part in parts]
    text = "".join(parts)
    whole = run([text], forced=forced)
    assert run(list(text), forced=forced) == whole
    assert run(parts, forced=forced) == whole
    said = "".join(
        event.text if isinstance(event, TextPiece) else block(event.name)
        for event in whole
        if not isinstance(event, ReasoningPiece)
    )
    assert "".join(said.split()) == "".join(text.split())


WORD = "Xx"
# Without what the rules leave out: text indented by four, lines that continue a quote without its mark, HTML, lists.
LINES = st.lists(
    st.lists(st.sampled_from(["`", "``", "```", "a", " ", "\\", WORD, WORD]), max_size=7).map("".join), max_size=6
)
STARTS = st.sampled_from(["", "", "", "```", "````", "~~~", "  ```", "# ", "```py", "   ~~~~ "])


@settings(max_examples=400)
@given(st.lists(st.tuples(STARTS, LINES), max_size=3).map(lambda one: "\n".join(a + "\n".join(b) for a, b in one)))
@example(f"a `\n{WORD}\n`")
@example(f"```{WORD}```")
@example(f"`` a ` {WORD} ` b")
def test_a_place_lies_in_code_where_commonmark_has_it(text: str) -> None:
    text = "\n".join(line if len(line) - len(line.lstrip()) < 4 else line.lstrip() for line in text.split("\n"))
    context, places = CodeContext(), []
    *before, last = text.split(WORD)
    for part in before:
        context.push(part)
        places.append(context.place())
    context.push(last)
    context.finish()
    assert [place.code for place in places] == words_in_code(text)


def words_in_code(text: str) -> list[bool]:
    """Of each ``WORD`` whether it lies in a closed code block or a code span."""
    ends_open = "Zz" in "".join(token.content for token in parsed(text + "\nZz") if token.type == "fence")
    tokens = parsed(text)
    fences = [token for token in tokens if token.type == "fence"]
    found: list[bool] = []
    for token in tokens:
        if token.type == "fence":
            closed = not (ends_open and token is fences[-1])
            found += [closed] * (token.info.count(WORD) + token.content.count(WORD))
        for child in token.children or ():
            found += [child.type == "code_inline"] * child.content.count(WORD)
    return found


def parsed(text: str) -> list[Any]:
    return list(MarkdownIt("commonmark").parse(text))
