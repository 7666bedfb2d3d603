"""A chat as data: its messages, its settings, one answer more, and what a user does with them.

Lives in ``cli`` for ``strata chat``; the engine keeps what it has read, so a conversation that goes on is not read
again. It must not know a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.config import BY_NAME
from strata.errors import ConfigError, RequestError
from strata.files import atomic_write, read_regular
from strata.option_values import format_value
from strata.paths import expanded
from strata.text.events import AnswerEvent, ReasoningPiece, TextPiece
from strata.text.messages import plain_messages

if TYPE_CHECKING:
    from strata.engine.cancellation import Cancellation
    from strata.engine.engine import Usage
    from strata.server.served import ServedEngine

__all__ = ["SETTINGS", "Conversation"]

SETTINGS = tuple(one.name for one in BY_NAME.values() if one.group == "sampling")
"""What ``/set`` takes beside ``thinking``: the sampling options by name."""


class Conversation:
    """``messages`` are as clients of the server send them. Not thread-safe."""

    def __init__(self, engine: ServedEngine, system: str | None = None) -> None:
        self._engine = engine
        self.messages: list[dict[str, Any]] = []
        self.settings: dict[str, object] = {}
        self.thinking: bool | None = None
        self.usage: Usage | None = None
        self._own_files: set[Path] = set()
        if engine.requested.origin("max_tokens") == "default":
            self.settings["max_tokens"] = engine.max_context  # the context's end comes first
        self.set_system(system)

    def ask(self, text: str, show: Callable[[AnswerEvent], None], cancellation: Cancellation) -> bool:
        """Adds ``text`` and its answer; False when the answer was cancelled, of which the shown part is kept.

        Raises ``StrataError``, and the conversation is as it was before.
        """
        kept = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        said, thought, finish = "", "", None
        try:
            options = {} if self.thinking is None else {"enable_thinking": self.thinking}
            params = self._engine.sampling(self.settings)
            request = self._engine.chat_request(self.messages, params, options=options)
            for piece in self._engine.submit(request, cancellation=cancellation, on_usage=self._take_usage):
                finish = piece.finish
                for event in piece.events:
                    show(event)
                    said += event.text if isinstance(event, TextPiece) else ""
                    thought += event.text if isinstance(event, ReasoningPiece) else ""
        except BaseException:
            del self.messages[kept:]
            raise
        answer: dict[str, Any] = {"role": "assistant", "content": said}
        if thought:
            answer["reasoning_content"] = thought
        self.messages.append(answer)
        return finish != "cancelled"

    def _take_usage(self, usage: Usage) -> None:
        self.usage = usage

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def set_system(self, text: str | None) -> None:
        """Replaces the system message, or removes it."""
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def clear(self) -> None:
        """Forgets everything but the system message and the settings."""
        self.messages = self.messages[: self.system is not None]

    def undo(self) -> bool:
        """Removes the last message of the user and what followed; False when there is none."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return False
        del self.messages[asked[-1] :]
        return True

    def set(self, name: str, value: str) -> None:
        """Sets a sampling option, or ``thinking`` to on, off or auto. Raises ``ConfigError``."""
        if name == "thinking":
            words: dict[str, bool | None] = {"on": True, "off": False, "auto": None}
            if value not in words:
                raise ConfigError(f"thinking: {value!r} cannot be taken", "give on, off or auto")
            self.thinking = words[value]
            return
        if name not in SETTINGS:
            raise ConfigError(f"no setting {name!r}", f"settings: thinking, {', '.join(SETTINGS)}")
        try:
            parsed = BY_NAME[name].parse(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {value!r} cannot be taken", f"give {error}") from None
        self._engine.sampling({**self.settings, name: parsed})  # refuses now what it would refuse with the next answer
        self.settings[name] = parsed

    def setting_lines(self) -> list[str]:
        """Every setting with its value in force."""
        words = {None: "auto", True: "on", False: "off"}
        own = {name: self.settings.get(name, getattr(self._engine.requested, name)) for name in SETTINGS}
        return [f"thinking {words[self.thinking]}", *(f"{name} {format_value(value)}" for name, value in own.items())]

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. A file that this conversation did not write is not replaced."""
        target = expanded(path).absolute()
        if target.exists() and target not in self._own_files:
            raise ConfigError(f"{path} exists already", "give another name, or remove it first")
        try:
            with atomic_write(target, "w") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", "give another name") from None
        self._own_files.add(target)

    def load(self, path: Path) -> None:
        """Replaces the messages by those of a file that ``save`` wrote, or by a plain JSON list of messages."""
        try:
            value = json.loads(read_regular(expanded(path)).decode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", "name a file that /save wrote") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text", "name a file that /save wrote") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}", "name a file that /save wrote") from None
        messages: Any = value.get("messages") if isinstance(value, dict) else value
        try:
            self.messages = plain_messages(messages)
        except RequestError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from None
