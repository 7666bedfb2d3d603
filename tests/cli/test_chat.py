"""``strata chat``: its conversation, its words with a slash, a pipe, and a real terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.cli.app import main
from strata.cli.chat import Chat
from strata.cli.chat_lines import Lines
from strata.cli.conversation import Conversation
from strata.engine.cancellation import Cancellation
from strata.errors import ConfigError, EngineError, RequestError
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.events import AnswerEvent, TextPiece
from strata.text.pipeline import TextPipeline
from tests.patience import PATIENCE_S
from tests.server.fake_engine import END, FakeEngine


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> TextPipeline:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return TextPipeline.from_directory(folder)


@pytest.fixture
def engine(pipeline: TextPipeline) -> FakeEngine:
    engine = FakeEngine(pipeline)
    engine.max_context = 1 << 20
    return engine


@pytest.fixture
def conversation(engine: FakeEngine) -> Conversation:
    return Conversation(engine)


def ask(conversation: Conversation, text: str) -> str:
    said: list[AnswerEvent] = []
    assert conversation.ask(text, said.append, Cancellation())
    return "".join(event.text for event in said if isinstance(event, TextPiece))


def prompt_of(engine: FakeEngine) -> str:
    return engine.text.tokenizer.decode(engine.seen[-1].ids, show_hidden=True)


def lines_of(*words: str) -> Lines:
    rest = list(words)

    def read_line(prompt: str) -> str:
        if not rest:
            raise EOFError
        return rest.pop(0)

    return Lines(read_line)


# The conversation -------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on(conversation: Conversation, engine: FakeEngine) -> None:
    assert ask(conversation, "first") == "hello"
    assert ask(conversation, "second") == "hello"
    assert [message["content"] for message in conversation.messages] == ["first", "hello", "second", "hello"]
    prompt = prompt_of(engine)
    assert prompt.index("first") < prompt.index("hello") < prompt.index("second")
    assert engine.seen[-1].params.max_tokens == engine.max_context, "an answer runs to its context's end"


def test_system_new_and_undo(engine: FakeEngine) -> None:
    conversation = Conversation(engine, "be brief")
    ask(conversation, "first")
    assert "system\nbe brief" in prompt_of(engine)
    conversation.set_system("be kind")
    ask(conversation, "second")
    assert "be brief" not in prompt_of(engine)
    assert conversation.undo()
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "be kind"}]
    assert not conversation.undo()
    conversation.set_system(None)
    assert conversation.messages == []


def test_a_fault_leaves_the_conversation_as_it_was(conversation: Conversation, engine: FakeEngine) -> None:
    ask(conversation, "first")
    before = list(conversation.messages)
    engine.raises, engine.raises_at = EngineError("a worker died"), 2
    with pytest.raises(EngineError):
        ask(conversation, "second")
    assert conversation.messages == before
    engine.raises, engine.max_context = None, 30
    with pytest.raises(RequestError):
        ask(conversation, "much longer than thirty tokens")
    assert conversation.messages == before


def test_a_stopped_answer_is_kept_as_far_as_it_was_shown(conversation: Conversation, engine: FakeEngine) -> None:
    cancellation = Cancellation()
    said: list[str] = []

    def show(event: AnswerEvent) -> None:
        assert isinstance(event, TextPiece)
        said.append(event.text)
        if len(said) == 3:
            cancellation.cancel()

    assert not conversation.ask("first", show, cancellation)
    assert conversation.messages[-1] == {"role": "assistant", "content": "hel"}
    assert ask(conversation, "second") == "hello"


def test_reasoning_is_kept_apart(conversation: Conversation, engine: FakeEngine) -> None:
    engine.script = [259, *b"hm", 260, *b"yes", END]
    ask(conversation, "first")
    assert conversation.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_settings(conversation: Conversation, engine: FakeEngine) -> None:
    conversation.set("temperature", "0.5")
    conversation.set("max_tokens", "3")
    conversation.set("thinking", "off")
    ask(conversation, "first")
    assert (engine.seen[-1].params.temperature, engine.seen[-1].params.max_tokens) == (0.5, 3)
    assert engine.options["options"] == {"enable_thinking": False}
    assert conversation.setting_lines()[:2] == ["thinking off", "temperature 0.5"]
    for name, value in (("temperature", "hot"), ("warmth", "1"), ("thinking", "maybe"), ("max_tokens", "0")):
        with pytest.raises(ConfigError):
            conversation.set(name, value)
    with pytest.raises(RequestError):
        conversation.set("temperature", "1000")
    assert conversation.settings["temperature"] == 0.5


def test_save_and_load(conversation: Conversation, engine: FakeEngine, tmp_path: Path) -> None:
    ask(conversation, "größer")
    path = tmp_path / "chat.json"
    conversation.save(path)
    conversation.save(path)
    other = Conversation(engine)
    other.load(path)
    assert other.messages == conversation.messages
    with pytest.raises(ConfigError, match="exists already"):
        other.save(path)
    plain = tmp_path / "list.json"
    plain.write_text(json.dumps([{"role": "user", "content": "x"}]))
    other.load(plain)
    assert other.messages == [{"role": "user", "content": "x"}]
    for content in ("{", '{"a": 1}', "[]", '[{"role": "king"}]'):
        plain.write_text(content)
        with pytest.raises(ConfigError, match=r"list\.json"):
            other.load(plain)
    with pytest.raises(ConfigError, match="cannot be read"):
        other.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be written"):
        other.save(tmp_path / "absent" / "x")


# Lines and words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["one \\", "two\\", "three", "four"], ["one \ntwo\nthree", "four"]),
        (['"""', "one", "", "two", '"""', "three"], ["one\n\ntwo", "three"]),
        (['"""one', 'two"""'], ["one\ntwo"]),
        (['"""one"""'], ["one"]),
        (['"""', "never ended"], ["never ended"]),
        (["ends \\"], ["ends "]),
        ([""], [""]),
    ],
)
def test_lines_become_messages(typed: list[str], messages: list[str]) -> None:
    lines = lines_of(*typed)
    found = []
    while (message := lines.next()) is not None:
        found.append(message)
    assert found == messages


def test_words_with_a_slash(
    conversation: Conversation, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.json"
    typed = [
        "/help", "/stats", "/system", "/system be brief", "/system", "hi", "/stats", "/set", "/set top_k 5",
        f"/save {path}", "/undo", "/undo", f"/load {path}", "//etc", "/system none", "/new", "   ", "/exit", "never",
    ]  # fmt: skip
    assert Chat(conversation, terminal=True).talk(lines_of(*typed)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "/undo", "(no answer yet)", "(no system message)", "be brief", "hello", "answer: 6 tokens, 25.0 tok/s",
        "prompt: ", "temperature 0", "(taken back)", "(nothing to take back)", "(3 messages)",
    ):  # fmt: skip
        assert words in out, words
    assert "/etc" in prompt_of(engine)
    assert "//etc" not in prompt_of(engine)
    assert len(engine.seen) == 2
    assert conversation.messages == []
    assert conversation.settings["top_k"] == 5


@pytest.mark.parametrize(
    "line", ["/nothing", "/set", "/set top_k many", "/set top_k", "/load", "/save", "/load absent"]
)
def test_mistakes_do_not_end_the_chat(
    conversation: Conversation, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert Chat(conversation, terminal=True).talk(lines_of(line, "hi")) == 0
    out, err = capsys.readouterr()
    assert "hello" in out
    assert (err == "") == (line == "/set")
    assert len(err.splitlines()) in (0, 2)


def test_what_a_terminal_would_obey_is_made_harmless(
    conversation: Conversation, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = [*"\x1b]0;title\x07 a\tb\nc \x9b2J".encode(), END]
    Chat(conversation, terminal=True).talk(lines_of("hi"))
    assert capsys.readouterr().out.startswith("␛]0;title␇ a\tb\nc \ufffd2J\n")
    Chat(conversation, terminal=False).talk(lines_of("hi"))
    assert capsys.readouterr().out == "\x1b]0;title\x07 a\tb\nc \x9b2J\n"


def test_reasoning_is_dim(conversation: Conversation, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.script = [259, *b"hm", 260, *b"yes", END]
    Chat(conversation, terminal=True).talk(lines_of("hi"))
    assert capsys.readouterr().out == "\x1b[2mhm\x1b[0myes\n\n"


def test_a_pipe_tells_of_an_error_by_its_status(
    conversation: Conversation, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.raises = EngineError("a worker died", "run strata doctor")
    assert Chat(conversation, terminal=False).talk(lines_of("hi")) == 1
    assert capsys.readouterr().err == "error: a worker died\n  try: run strata doctor\n"


def test_ctrl_c_stops_the_answer_alone(
    conversation: Conversation, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed(list[int]):
        """Tokens; Ctrl-C comes with the fourth, and again where it is not heard."""

        def __iter__(self) -> Iterator[int]:
            for number, token in enumerate(super().__iter__()):
                if number % 2000 == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                yield token

    engine.script, engine.pause = Pressed([97] * 100_000), 0.01
    before = signal.getsignal(signal.SIGINT)
    assert Chat(conversation, terminal=True).talk(lines_of("hi", "/exit")) == 0
    assert engine.log == ["begin", "cancelled", "end"]
    assert conversation.messages[-1]["content"].startswith("a")
    assert "(stopped)" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


# The command -------------------------------------------------------------------------------------------------------


def test_the_real_model_over_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/stats\nagain\n/stats\n"))
    assert main(["chat", "built-in-random", "--max-tokens", "4", "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line for line in out.splitlines() if line.startswith(("prompt: ", "answer: "))]
    assert [line.partition(" tokens")[0] for line in lines if line.startswith("answer")] == ["answer: 4"] * 2
    assert "0 kept" in lines[0]


def test_input_that_is_no_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", "built-in-random", "--max-tokens", "2"]) == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


CHILD = """
import contextlib, sys, tempfile
from strata.cli import app, loading
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.pipeline import TextPipeline
from tests.server.fake_engine import FakeEngine

class Slow(FakeEngine):
    def chat_request(self, messages, params, **how):
        long = "long" in messages[-1]["content"]
        self.script, self.pause = ([97] * 100_000, 0.02) if long else ([*b"hello", 258], 0.0)
        return super().chat_request(messages, params, **how)

folder = tempfile.mkdtemp()
byte_tokenizer(folder)
engine = Slow(TextPipeline.from_directory(folder))
engine.max_context = 1 << 20
loading.load_engine = lambda requested: contextlib.nullcontext(engine)
sys.exit(app.main(["chat"]))
"""


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, root: Path, script: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=root, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "PYTHONPATH": str(root), "TERM": "dumb"},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE_S) -> None:
        ends = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < ends, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536).decode("utf-8", "replace")

    def interrupt_line(self, text: str) -> None:
        """Press Ctrl-C at the line editor until ``text`` comes.

        Python's line editor waits for keys with select(): a signal between the handling of a key and that wait is
        noticed at the next key only, so on a busy machine one press right after an echo can be slept over.
        """
        self.seen = ""
        ends = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < ends, f"{text!r} did not come: {self.seen!r}"
            os.write(self.master, b"\x03")
            pressed = time.monotonic()
            while text not in self.seen and time.monotonic() - pressed < 5:
                if select.select([self.master], [], [], 0.1)[0]:
                    self.seen += os.read(self.master, 65536).decode("utf-8", "replace")


@pytest.fixture
def terminal(root: Path) -> Iterator[Terminal]:
    terminal = Terminal(root, CHILD)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
        terminal.process.wait()
    os.close(terminal.master)


def test_on_a_terminal(terminal: Terminal, session_home: Path) -> None:
    terminal.wait_for("> ")
    assert "fake: no layers" in terminal.seen
    terminal.type("hi\r")
    terminal.wait_for("hello\r\n> ")
    terminal.type("two \\\r")
    terminal.wait_for(". ")
    terminal.type("lines\r")
    terminal.wait_for("hello\r\n> ")
    terminal.type("something long\r")
    terminal.wait_for("aaa")
    terminal.type("\x03")
    terminal.wait_for("(stopped)\r\n> ")
    terminal.type("half a message")
    terminal.wait_for("half a message")  # the line editor has the keyboard now
    terminal.interrupt_line("(Ctrl-D or /exit ends)\r\n> ")
    path = session_home / "kept.json"
    terminal.type(f"/save {path}\r")
    terminal.wait_for("\r\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0
    messages: list[dict[str, Any]] = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert messages[2]["content"] == "two \nlines"
    assert messages[5]["content"].startswith("aaa")
    history = session_home / "chat-history"
    assert history.stat().st_mode & 0o077 == 0
    assert "something long" in history.read_text()
