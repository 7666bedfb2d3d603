"""A past call whose arguments are no object reaches the template all the same (fault 43)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from strata.text.answer_parser import AnswerParser
from strata.text.events import ToolCall
from strata.text.pipeline import TextPipeline

# What a model may have written -> what it means where that is an object.
ARGUMENTS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "an object": ({"a": 1}, {"a": 1}),
    "its JSON": ('{"a": 1}', {"a": 1}),
    "nothing": (None, {}),
    "no text": ("", {}),
    "null": ("null", {}),
    "cut": ('{"a": "b', None),
    "a list": ("[1, 2]", None),
    "a list of its own": ([1, 2], None),
    "a number": ("7", None),
    "two objects": ('{"a": 1}{"b": 2}', None),
    "single quotes": ("{'a': 1}", None),
    "half a surrogate pair": ('{"a": "\\ud83d"}', None),
    "a number without end": ('{"a": ' + "9" * 5000 + "}", None),
    "without end": ("[" * 100_000, None),
}
KEYS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"  # noqa: E501
TEXTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    "{{ a if a is string else a | tojson }}{% endfor %}{% endfor %}"
)


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "failed", "tool_call_id": "c"},
    ]


def pipeline_with(template: str | None, bytes_dir: Path, folder: Path) -> TextPipeline:
    for path in bytes_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return TextPipeline.from_directory(folder)


def raw(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else "[1, 2]"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_conversation_goes_on(name: str, bytes_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given, meant = ARGUMENTS[name]
    pipeline = pipeline_with(None, bytes_dir, tmp_path)  # the family's template goes through the keys
    with caplog.at_level(logging.WARNING):
        text = pipeline.chat(conversation(given)).text
    called = text.partition("<function=f>\n")[2].partition("</function>")[0]
    expected = {"arguments": raw(given)} if meant is None else meant
    assert called == "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in expected.items())
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) == (meant is None)
    assert all(words.startswith("messages[1].tool_calls[0]: its arguments are ") for words in said)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_templates_of_both_kinds_take_them(name: str, bytes_dir: Path, tmp_path: Path) -> None:
    given, meant = ARGUMENTS[name]
    keys = pipeline_with(KEYS, bytes_dir, tmp_path).chat(conversation(given)).text
    expected = {"arguments": raw(given)} if meant is None else meant
    assert keys == "".join(f"{key}={value};" for key, value in expected.items())
    text = pipeline_with(TEXTS, bytes_dir, tmp_path).chat(conversation(given)).text
    assert text == (raw(given) if meant is None else ('{"a": 1}' if meant else "{}"))


def test_a_call_with_half_a_surrogate_pair_can_be_sent_back() -> None:
    """As the client gets it, it is a text that UTF-8 can hold."""
    bodies = [
        ("json", '{"name": "f", "arguments": {"a": "\\ud83d"}}'),
        ("tagged", '<function=f>\n<parameter=a>\n["\\ud83d"]\n</parameter>\n</function>'),
    ]
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}]
    for tool_format, body in bodies:
        parser = AnswerParser(tool_format=tool_format, tools=tools)  # type: ignore[arg-type]
        call = parser.push(f"<tool_call>\n{body}\n</tool_call>")[0]
        assert isinstance(call, ToolCall)
        assert "\\ud83d" in call.arguments.encode().decode()
