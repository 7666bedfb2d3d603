"""What each public interface calls the end of an answer: one table, so that routes and clients agree.

Lives beside ``events.py``, whose ``Finish`` it reads. It must not know HTTP.

Source: the published references of OpenAI's chat, completions and responses interfaces and of Anthropic's messages.
"""

from __future__ import annotations

from strata.text.events import Finish

__all__ = ["chat_reason", "completion_reason", "messages_reason", "response_status"]


def chat_reason(finish: Finish) -> str:
    """``finish_reason`` of a chat completion: stop, length or tool_calls."""
    return finish.reason


def completion_reason(finish: Finish) -> str:
    """``finish_reason`` of a plain completion, which knows no tools: stop or length."""
    return "length" if finish.reason == "length" else "stop"


def messages_reason(finish: Finish) -> str:
    """``stop_reason`` of a message: end_turn, stop_sequence, max_tokens or tool_use."""
    if finish.reason == "length":
        return "max_tokens"
    if finish.reason == "tool_calls":
        return "tool_use"
    return "end_turn" if finish.stop_string is None else "stop_sequence"


def response_status(finish: Finish) -> tuple[str, str | None]:
    """``status`` of a response and, where it is incomplete, the reason."""
    return ("incomplete", "max_output_tokens") if finish.reason == "length" else ("completed", None)
