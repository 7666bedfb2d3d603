"""``strata chat [MODEL]``: a conversation in the terminal, or over a pipe, one message a line.

Lives in ``cli``: reads lines, shows answers, and knows the words that begin with a slash; what they do to the
conversation is ``conversation.py``'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.configure import Configure
from strata.cli.streaming import stopped_by_ctrl_c
from strata.errors import ConfigError, StrataError
from strata.logs import quiet_unless_asked
from strata.words import count_of

if TYPE_CHECKING:
    from strata.cli.chat_lines import Lines
    from strata.cli.conversation import Conversation
    from strata.text.events import AnswerEvent

__all__ = ["Chat", "command"]

HELP = '''/help               this list
/new                forget the conversation; system message and settings stay
/system [TEXT]      set the system message; 'none' removes it, nothing shows it
/undo               take back the last message and its answer
/save FILE          write the conversation as JSON
/load FILE          go on with a saved one
/stats              tokens and speed of the last answer
/set [NAME VALUE]   set thinking (on, off, auto) or a sampling option; nothing shows all
/exit               end, as Ctrl-D does
A line that ends in a backslash goes on; """ begins and ends a block of lines.
Ctrl-C stops an answer and keeps what was said. A message that begins with a slash is written with two.'''

# A model can say anything; what a terminal would obey is shown as a picture of the character instead.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(128, 160), 0xFFFD)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def command(
    configure: Configure,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A pack, checkpoint folder or name.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
) -> int:
    """Chats in the terminal; /help there lists what can be typed."""
    requested = configure(name)
    quiet_unless_asked(requested)
    from strata.cli.chat_lines import terminal_lines
    from strata.cli.conversation import Conversation
    from strata.cli.loading import load_engine

    with load_engine(requested) as engine:
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if terminal:
            print(f"{engine.describe()}\n/help lists what can be typed, Ctrl-D ends")
        return Chat(Conversation(engine, system), terminal=terminal).talk(terminal_lines())


class Chat:
    """One sitting. ``terminal``: answers are coloured and made harmless, errors do not count for the exit status."""

    def __init__(self, conversation: Conversation, *, terminal: bool) -> None:
        self._conversation = conversation
        self._terminal = terminal
        self._dim = False

    def talk(self, lines: Lines) -> int:
        """Until the input or ``/exit`` ends it. From a pipe: the status of the last error, 130 after Ctrl-C."""
        status = 0
        while True:
            try:
                line = lines.next()
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print("\n(Ctrl-D or /exit ends)")
                continue
            if line is None:
                if self._terminal:
                    print()
                return status
            if not line.strip():
                continue
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not self._obey(line):
                        return status
                elif not self._answer(line.removeprefix("/") if line.startswith("//") else line):
                    return 130
            except StrataError as error:
                self._tell(error)
                status = status if self._terminal else error.exit_status

    def _answer(self, text: str) -> bool:
        """Shows the answer; False when it was stopped and there is nobody to go on."""
        from strata.engine.cancellation import Cancellation

        cancellation = Cancellation()
        with stopped_by_ctrl_c(cancellation):
            try:
                whole = self._conversation.ask(text, self._show, cancellation)
            except KeyboardInterrupt:  # pressed twice: where the engine is, is not known, so it begins afresh
                if not self._terminal:
                    raise
                self._end_line()
                print("(stopped, and your message taken back)")
                return True
            except StrataError:
                self._end_line()
                raise
            self._end_line()
        if not whole and self._terminal:
            print("(stopped)")
        return whole or self._terminal

    def _show(self, event: AnswerEvent) -> None:
        from strata.text.events import ReasoningPiece, TextPiece

        if not isinstance(event, (TextPiece, ReasoningPiece)):
            return
        dim = isinstance(event, ReasoningPiece)
        text = event.text.translate(_CONTROLS) if self._terminal else event.text
        if self._terminal and dim != self._dim:
            text = (_DIM if dim else _PLAIN) + text
        self._dim = dim
        sys.stdout.write(text)
        sys.stdout.flush()

    def _end_line(self) -> None:
        sys.stdout.write(f"{_PLAIN}\n" if self._terminal and self._dim else "\n")
        sys.stdout.flush()
        self._dim = False

    def _tell(self, error: StrataError) -> None:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)

    def _obey(self, line: str) -> bool:
        """Carries out a word with a slash; False to end. Raises ``StrataError``."""
        word, _, rest = line[1:].strip().partition(" ")
        if word in ("exit", "quit"):
            return False
        actions: dict[str, Callable[[str], None]] = {
            "help": lambda rest: print(HELP),
            "new": lambda rest: self._conversation.clear(),
            "system": self._system,
            "undo": self._undo,
            "save": lambda rest: self._conversation.save(_path(rest)),
            "load": self._load,
            "stats": lambda rest: print("\n".join(self._stat_lines())),
            "set": self._set,
        }
        if word not in actions:
            raise ConfigError(f"no command /{word}", "/help lists them; '//' begins a message with a slash")
        actions[word](rest.strip())
        return True

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system(None if text == "none" else text)
        else:
            print(self._conversation.system or "(no system message)")

    def _undo(self, rest: str) -> None:
        print("(taken back)" if self._conversation.undo() else "(nothing to take back)")

    def _load(self, rest: str) -> None:
        self._conversation.load(_path(rest))
        print(f"({len(self._conversation.messages)} messages)")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            print("\n".join(self._conversation.setting_lines()))
        elif not value.strip():
            raise ConfigError(f"/set {name}: no value", "/set NAME VALUE; /set alone shows all")
        else:
            self._conversation.set(name, value.strip())

    def _stat_lines(self) -> list[str]:
        usage = self._conversation.usage
        if usage is None:
            return ["(no answer yet)"]
        read = usage.prompt_tokens - usage.cached_tokens
        lines = [f"prompt: {count_of(usage.prompt_tokens, 'token')}, {usage.cached_tokens} kept, {read} read"]
        if usage.prompt_seconds:
            lines[0] += f" in {1e3 * usage.prompt_seconds:.0f} ms ({read / usage.prompt_seconds:.1f} tok/s)"
        lines.append(f"answer: {count_of(usage.completion_tokens, 'token')}")
        if usage.decode_seconds:  # the first token comes of the prompt
            lines[1] += f", {max(0, usage.completion_tokens - 1) / usage.decode_seconds:.1f} tok/s"
        return lines


def _path(text: str) -> Path:
    if not text:
        raise ConfigError("no file was named", "/save FILE, /load FILE")
    return Path(text)
